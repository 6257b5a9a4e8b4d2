"""System checks: a start with a setting that cannot work says so in one sentence."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core import checks

__all__ = ["join_token_is_set"]

MIN_TOKEN_LENGTH = 16


@checks.register(checks.Tags.security)
def join_token_is_set(**_: Any) -> list[checks.CheckMessage]:
    token = str(settings.VLLM_HI_TOKEN)
    if not token:
        return [
            checks.Warning(
                "No join token: no instance can register.",
                hint="Set VLLM_HI_TOKEN to the same long random text here and at every instance.",
                id="controlplane.W001",
            )
        ]
    if len(token) < MIN_TOKEN_LENGTH:
        return [
            checks.Warning(
                f"The join token has {len(token)} characters.",
                hint=f"Use at least {MIN_TOKEN_LENGTH} random characters.",
                id="controlplane.W002",
            )
        ]
    return []
