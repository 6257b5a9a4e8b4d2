"""API addresses of the inventory: `v1` under /api/v1/, `seed` under /vllm_hi/."""

from __future__ import annotations

from django.urls import path
from rest_framework.routers import SimpleRouter

from instances.api import views

__all__ = ["seed", "v1"]

_router = SimpleRouter(trailing_slash=False)
_router.register("instances", views.InstanceViewSet, basename="api-instance")

v1 = _router.urls
seed = [
    path("register", views.RegisterView.as_view(), name="seed-register"),
    path("heartbeat", views.HeartbeatView.as_view(), name="seed-heartbeat"),
    path("deregister", views.DeregisterView.as_view(), name="seed-deregister"),
    path("status", views.SeedStatusView.as_view(), name="seed-status"),
    path("instances", views.SeedInstancesView.as_view(), name="seed-instances"),
]
