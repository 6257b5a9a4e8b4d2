"""Every address of the panel but `/v1/*`, which the ASGI entry hands to the proxy."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from controlplane.api import urls as controlplane_api
from controlplane.health import healthz, readyz
from instances.api import urls as instances_api
from migrations_app.api import urls as migrations_api

__all__ = ["urlpatterns"]

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("api/v1/", include([*controlplane_api.v1, *instances_api.v1, *migrations_api.v1])),
    path("api/schema", SpectacularAPIView.as_view(), name="api-schema"),
    path("api/docs", SpectacularSwaggerSplitView.as_view(url_name="api-schema"), name="api-docs"),
    path("vllm_hi/", include([*instances_api.seed, *migrations_api.seed])),
    path("admin/", admin.site.urls),
    path("", include("controlplane.pages")),
]
