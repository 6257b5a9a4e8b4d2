from __future__ import annotations

from django.urls import path

from controlplane.api.views import TokenView

__all__ = ["v1"]

v1 = [path("tokens", TokenView.as_view(), name="api-tokens")]
