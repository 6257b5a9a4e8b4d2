"""The audit trail in the admin: everything can be read, nothing changed."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from migrations_app.models import MigrationEvent, MigrationJob, MigrationRequest, MigrationRound

__all__: list[str] = []


class _ReadOnly:
    """Takes away adding, changing and deleting; viewing stays with those who may view."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class RoundInline(_ReadOnly, admin.TabularInline):  # type: ignore[type-arg]
    model = MigrationRound
    extra = 0


class RequestInline(_ReadOnly, admin.TabularInline):  # type: ignore[type-arg]
    model = MigrationRequest
    extra = 0


class EventInline(_ReadOnly, admin.TabularInline):  # type: ignore[type-arg]
    model = MigrationEvent
    extra = 0


@admin.register(MigrationJob)
class MigrationJobAdmin(_ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["id", "created_at", "source", "target", "migration_type", "state", "moved_requests", "created_by"]
    list_filter = ["state", "migration_type"]
    list_select_related = ["source", "target", "created_by"]
    search_fields = ["=id", "source__vllm_hi_id", "target__vllm_hi_id", "error_code"]
    date_hierarchy = "created_at"
    inlines = [RoundInline, RequestInline, EventInline]


@admin.register(MigrationEvent)
class MigrationEventAdmin(_ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["job", "seq", "created_at", "kind", "step", "message"]
    list_filter = ["kind", "step"]
    list_select_related = ["job"]


@admin.register(MigrationRound)
class MigrationRoundAdmin(_ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["job", "round_index", "kind", "blocks", "bytes", "dirty_blocks", "duration_ms"]
    list_select_related = ["job"]


@admin.register(MigrationRequest)
class MigrationRequestAdmin(_ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["job", "request_id", "outcome", "code", "prompt_tokens", "output_tokens", "gap_ms"]
    list_filter = ["outcome"]
    list_select_related = ["job"]
