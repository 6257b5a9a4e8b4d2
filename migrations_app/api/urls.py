"""API addresses of migrations: `v1` under /api/v1/, `seed` under /vllm_hi/."""

from __future__ import annotations

from django.urls import path
from rest_framework.routers import SimpleRouter

from migrations_app.api import views

__all__ = ["seed", "v1"]

_router = SimpleRouter(trailing_slash=False)
_router.register("migrations", views.MigrationViewSet, basename="api-migration")

v1 = _router.urls
seed = [
    path("migrate", views.SeedMigrateView.as_view(), name="seed-migrate"),
    path("migration/<str:migration_id>/status", views.SeedMigrationStatusView.as_view(), name="seed-migration-status"),
]
