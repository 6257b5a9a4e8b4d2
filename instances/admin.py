"""Instances in the admin: to look at. They change by registering, by heartbeats and by migrations."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from instances.models import Instance

__all__: list[str] = []


@admin.register(Instance)
class InstanceAdmin(admin.ModelAdmin):
    list_display = ["vllm_hi_id", "ip", "port", "instance_type", "status", "served_model_name", "last_heartbeat_at"]
    list_filter = ["status", "instance_type", "served_model_name"]
    search_fields = ["vllm_hi_id", "ip"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
