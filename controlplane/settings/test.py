"""The test suite: a fast password hash, a known join token, Redis database 5 unless REDIS_URL says otherwise."""

from __future__ import annotations

from controlplane.settings.base import *  # noqa: F403  settings are made to be layered
from controlplane.settings.base import CHANNEL_LAYERS, DATABASES, STATE_DIR, configure_database, env

SECRET_KEY = "tests-only-not-a-secret-0123456789-0123456789-0123456789"
VLLM_HI_TOKEN = env.str("VLLM_HI_TOKEN", default="join-token-for-tests")
ALLOWED_HOSTS = ["testserver", "127.0.0.1", "localhost"]

if not env.str("DATABASE_URL", default=""):
    DATABASES["default"] = env.db_url_config("sqlite:///:memory:")
    # A file, not memory: tests write from several threads and processes.
    DATABASES["default"]["TEST"] = {"NAME": str(STATE_DIR.absolute() / "test.sqlite3")}
    STATE_DIR.mkdir(parents=True, exist_ok=True)
    configure_database(DATABASES["default"])

REDIS_URL = env.str("REDIS_URL", default="redis://127.0.0.1:6379/5")
CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default=REDIS_URL)
CHANNEL_LAYERS["default"]["CONFIG"]["hosts"] = [REDIS_URL]  # type: ignore[index]

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
WHITENOISE_AUTOREFRESH = True
WHITENOISE_USE_FINDERS = True
