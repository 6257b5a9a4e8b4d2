"""Who may do what: people and programs read when they are logged in and change things as operators; instances hold
the join token."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from rest_framework import authentication, exceptions, permissions
from rest_framework.request import Request

if TYPE_CHECKING:
    # The framework imports this module while its own views are still being loaded.
    from rest_framework.views import APIView

__all__ = ["OPERATOR_GROUP", "VIEWER_GROUP", "IsInstance", "JoinTokenAuthentication", "ReadOrOperate", "may_operate"]

VIEWER_GROUP = "viewer"
OPERATOR_GROUP = "operator"


def may_operate(user: Any) -> bool:
    """True for superusers and members of the group "operator"."""
    if not getattr(user, "is_active", False):
        return False
    return bool(user.is_superuser) or user.groups.filter(name=OPERATOR_GROUP).exists()


class ReadOrOperate(permissions.BasePermission):
    """Reading needs a login, everything else the operator's rights."""

    message = "Only operators may do this; ask an administrator for the group operator."

    def has_permission(self, request: Request, view: APIView) -> bool:
        user = request.user
        if not (user and user.is_authenticated):
            return False
        return request.method in permissions.SAFE_METHODS or may_operate(user)


class JoinedInstance(AnonymousUser):
    """Whoever presents the join token."""

    @property
    def is_authenticated(self) -> Any:
        return True


class JoinTokenAuthentication(authentication.BaseAuthentication):
    """`Authorization: Bearer <join token>`; 401 `wrong_token` when it is missing or wrong."""

    def authenticate(self, request: Request) -> tuple[JoinedInstance, str]:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        expected = str(settings.VLLM_HI_TOKEN)
        right = hmac.compare_digest(token.strip().encode(), expected.encode())
        # Without a configured token nobody gets in.
        if scheme.lower() != "bearer" or not expected or not right:
            raise exceptions.AuthenticationFailed(
                "The join token is missing or wrong: send Authorization: Bearer with the panel's VLLM_HI_TOKEN."
            )
        return JoinedInstance(), token

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class IsInstance(permissions.BasePermission):
    def has_permission(self, request: Request, view: APIView) -> bool:
        return isinstance(request.user, JoinedInstance)
