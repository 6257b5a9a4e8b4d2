"""A real deployment: secrets are required, cookies travel over TLS only, static files carry their hash."""

from __future__ import annotations

from controlplane.settings.base import *  # noqa: F403  settings are made to be layered
from controlplane.settings.base import env

SECRET_KEY = env.str("SECRET_KEY")
VLLM_HI_TOKEN = env.str("VLLM_HI_TOKEN")
DEBUG = False

SESSION_COOKIE_SECURE = True
CSRF_COOKIE_SECURE = True
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
SECURE_SSL_REDIRECT = env.bool("SECURE_SSL_REDIRECT", default=True)
# Instances inside the cluster register over plain HTTP with the join token.
SECURE_REDIRECT_EXEMPT = [r"^vllm_hi/(register|heartbeat|deregister)$", r"^healthz$", r"^readyz$"]
SECURE_HSTS_SECONDS = env.int("SECURE_HSTS_SECONDS", default=31536000)
SECURE_HSTS_INCLUDE_SUBDOMAINS = env.bool("SECURE_HSTS_INCLUDE_SUBDOMAINS", default=True)
SECURE_HSTS_PRELOAD = env.bool("SECURE_HSTS_PRELOAD", default=True)

STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}
