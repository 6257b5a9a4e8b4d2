"""What templates of all apps need to know about this panel and about who looks at it."""

from __future__ import annotations

from urllib.parse import urlsplit

from django import template
from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser

from controlplane.permissions import may_operate as _may_operate

register = template.Library()


@register.filter
def may_operate(user: AbstractBaseUser | AnonymousUser) -> bool:
    """True for those who may start and abort migrations. Hides buttons only: the services' callers check again."""
    return _may_operate(user)


@register.simple_tag
def panel_url() -> str:
    """Base URL for `curl` examples, without a trailing slash."""
    return str(settings.VLLM_HI_PUBLIC_URL)


@register.simple_tag
def panel_address() -> str:
    """host:port for `--vllm-hi-host`."""
    return urlsplit(settings.VLLM_HI_PUBLIC_URL).netloc
