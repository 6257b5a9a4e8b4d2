"""What all deployments share. Everything that differs between machines comes from environment variables."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import environ

from controlplane.redis import with_database

env = environ.Env()

BASE_DIR = Path(__file__).resolve().parent.parent.parent
STATE_DIR = Path(env.str("VLLM_HI_STATE_DIR", default=".demo"))

SECRET_KEY: str = env.str("SECRET_KEY", default="")
DEBUG: bool = env.bool("DEBUG", default=False)
ALLOWED_HOSTS: list[str] = env.list("ALLOWED_HOSTS", default=["127.0.0.1", "localhost", "[::1]"])

#: The secret that instances, proxies and the panel share.
VLLM_HI_TOKEN: str = env.str("VLLM_HI_TOKEN", default="")
#: What users see in `curl` examples; no trailing slash.
VLLM_HI_PUBLIC_URL: str = env.str("VLLM_HI_PUBLIC_URL", default="http://127.0.0.1:8002").rstrip("/")
CSRF_TRUSTED_ORIGINS = [VLLM_HI_PUBLIC_URL]

#: Seconds. An instance that has not sent a heartbeat for that long is unreachable (it sends one every 2 s).
VLLM_HI_HEARTBEAT_TIMEOUT_S = 6.0
#: Seconds. How long a worker may be silent before its migration job is taken away from it, and how often it renews.
VLLM_HI_JOB_LEASE_S = env.float("VLLM_HI_JOB_LEASE_S", default=30.0)
VLLM_HI_JOB_RENEW_S = env.float("VLLM_HI_JOB_RENEW_S", default=5.0)
#: Seconds. The lease that instances put on what a migration holds there.
VLLM_HI_SESSION_LEASE_S = env.float("VLLM_HI_SESSION_LEASE_S", default=30.0)
#: Seconds. How long a job waits for the proxies to acknowledge a new routing table.
VLLM_HI_ROUTE_ACK_S = 5.0
#: Seconds. How long requests that cannot move may keep the source of a migration alive.
VLLM_HI_DRAIN_DEADLINE_S = env.float("VLLM_HI_DRAIN_DEADLINE_S", default=120.0)
#: Seconds. How long a standby may take to bring its engine up.
VLLM_HI_INSTANTIATE_DEADLINE_S = env.float("VLLM_HI_INSTANTIATE_DEADLINE_S", default=900.0)
#: Requests that are handed over at the same time. Small waves: a small gap for each client.
VLLM_HI_HANDOVER_WAVE = env.int("VLLM_HI_HANDOVER_WAVE", default=4)
VLLM_HI_MAX_INCR_ROUNDS = env.int("VLLM_HI_MAX_INCR_ROUNDS", default=8)
VLLM_HI_INCR_STALL_ROUNDS = env.int("VLLM_HI_INCR_STALL_ROUNDS", default=2)

INSTALLED_APPS = [
    "daphne",
    "whitenoise.runserver_nostatic",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "channels",
    "rest_framework",
    "django_filters",
    "knox",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "axes",
    "csp",
    "django_htmx",
    "controlplane",
    "instances",
    "migrations_app",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    # Last: it turns a locked-out login into a response.
    "axes.middleware.AxesMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
APPEND_SLASH = False

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# -- database --------------------------------------------------------------------------------------------------------

DATABASES: dict[str, dict[str, Any]] = {
    "default": env.db_url("DATABASE_URL", default=f"sqlite:///{(STATE_DIR / 'panel.sqlite3').absolute()}")
}


def configure_database(database: dict[str, Any]) -> None:
    """Adds what SQLite needs with several writing processes: without it, some writes fail with "database is locked"."""
    database["ATOMIC_REQUESTS"] = False
    if database["ENGINE"] == "django.db.backends.sqlite3":
        database.setdefault("OPTIONS", {}).update(
            {
                "timeout": 20,
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA busy_timeout=20000",
            }
        )


configure_database(DATABASES["default"])
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# -- Redis: routing table in the URL's own database, Celery in database 1 --------------------------------------------

REDIS_URL: str = env.str("REDIS_URL", default="redis://127.0.0.1:6379/0")

CHANNEL_LAYERS = {
    "default": {
        # The default layer of channels_redis blocks in a way that newer Redis clients time out after 5 s of silence.
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "vllm_hi_ws"},
    }
}

CELERY_BROKER_URL: str = env.str("CELERY_BROKER_URL", default=with_database(REDIS_URL, 1))

# -- people, programs, instances -------------------------------------------------------------------------------------

AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "dashboard"
LOGOUT_REDIRECT_URL = "login"

AXES_FAILURE_LIMIT = 5
AXES_COOLOFF_TIME = timedelta(minutes=15)
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False
AXES_LOCKOUT_CALLABLE = "controlplane.lockout.locked_out"

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        # The first one decides that a request without credentials gets 401 and not 403.
        "knox.auth.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.permissions.ReadOrOperate"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.LimitOffsetPagination",
    "PAGE_SIZE": 100,
    "EXCEPTION_HANDLER": "controlplane.errors.exception_handler",
}
REST_KNOX = {
    "AUTH_HEADER_PREFIX": "Bearer",
    "TOKEN_TTL": timedelta(days=90),
}
SPECTACULAR_SETTINGS = {
    "TITLE": "vLLM-HI control panel",
    "DESCRIPTION": "Instances, live migrations and their audit trail.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.IsAuthenticated"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
}

# -- browser safety --------------------------------------------------------------------------------------------------

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "frame-ancestors": ["'none'"],
        "form-action": ["'self'"],
        "base-uri": ["'self'"],
        "object-src": ["'none'"],
    }
}
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
X_FRAME_OPTIONS = "DENY"

# -- the rest --------------------------------------------------------------------------------------------------------

STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "staticfiles"
STATICFILES_DIRS = [BASE_DIR / "static"]

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": "controlplane.logging.LineFormatter"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": env.str("LOG_LEVEL", default="INFO")},
    "loggers": {
        "httpx": {"level": "WARNING"},
        "httpcore": {"level": "WARNING"},
        "daphne.http_protocol": {"level": "WARNING"},
        "axes": {"level": "WARNING"},
    },
}
