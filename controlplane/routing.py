"""Websocket addresses."""

from __future__ import annotations

from django.urls import path

from migrations_app.consumers import DashboardConsumer, MigrationConsumer

__all__ = ["websocket_urlpatterns"]

websocket_urlpatterns = [
    path("ws/migrations/<uuid:job_id>/", MigrationConsumer.as_asgi()),
    path("ws/dashboard/", DashboardConsumer.as_asgi()),
]
