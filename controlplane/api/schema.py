"""What the OpenAPI generator cannot find out by itself."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

__all__ = ["JoinTokenScheme"]


class JoinTokenScheme(OpenApiAuthenticationExtension):
    target_class = "controlplane.permissions.JoinTokenAuthentication"
    name = "joinToken"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "The join token, VLLM_HI_TOKEN."}
