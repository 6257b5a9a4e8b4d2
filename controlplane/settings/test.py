"""The test suite: a fast password hash, a known join token, Redis database 5 unless REDIS_URL says otherwise."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from controlplane.settings.base import *  # noqa: F403  settings are made to be layered
from controlplane.settings.base import CHANNEL_LAYERS, DATABASES, configure_database, env

SECRET_KEY = "tests-only-not-a-secret-0123456789-0123456789-0123456789"
VLLM_HI_TOKEN = env.str("VLLM_HI_TOKEN", default="join-token-for-tests")
ALLOWED_HOSTS = ["testserver", "127.0.0.1", "localhost"]

if not env.str("DATABASE_URL", default=""):
    # A file of this run's own, not memory: tests write from several threads.
    name = str(Path(tempfile.gettempdir()) / f"vllm-hi-panel-{os.getpid()}.sqlite3")
    DATABASES["default"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "TEST": {"NAME": f"{name}.test"}}
    configure_database(DATABASES["default"])

REDIS_URL = env.str("REDIS_URL", default="redis://127.0.0.1:6379/5")
CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default=REDIS_URL)
CHANNEL_LAYERS["default"]["CONFIG"]["hosts"] = [REDIS_URL]  # type: ignore[index]

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
WHITENOISE_AUTOREFRESH = True
WHITENOISE_USE_FINDERS = True
