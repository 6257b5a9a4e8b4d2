"""The demo and a developer's machine: loopback only, a secret key that lives in the state directory."""

from __future__ import annotations

import secrets

from controlplane.settings.base import *  # noqa: F403  settings are made to be layered
from controlplane.settings.base import DEBUG, SECRET_KEY, STATE_DIR

STATE_DIR.mkdir(parents=True, exist_ok=True)


def _secret_key() -> str:
    path = STATE_DIR / "secret_key"
    try:
        # "x": of several processes that start together, one creates the file and the others read it.
        with path.open("x") as file:
            path.chmod(0o600)
            file.write(secrets.token_urlsafe(50))
    except FileExistsError:
        pass
    return path.read_text()


if not SECRET_KEY:
    SECRET_KEY = _secret_key()

WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG
