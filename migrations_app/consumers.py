"""Websockets of the live pages. They only listen; the vocabulary is in `publisher`."""

from __future__ import annotations

from typing import Any

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer

from migrations_app.api.serializers import JobSerializer
from migrations_app.models import MigrationJob
from migrations_app.publisher import DASHBOARD_GROUP, job_group, plain
from migrations_app.selectors import get_job

__all__ = ["DashboardConsumer", "MigrationConsumer"]

#: Close codes of this application.
NOT_LOGGED_IN = 4401
NOT_FOUND = 4404


class _GroupConsumer(AsyncJsonWebsocketConsumer):
    """Joins one group and forwards what is pushed to it."""

    group: str = ""

    async def connect(self) -> None:
        user = self.scope.get("user")
        if user is None or not user.is_authenticated:
            await self.close(code=NOT_LOGGED_IN)
            return
        await self.open()

    async def open(self) -> None:
        await self.channel_layer.group_add(self.group, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        if self.group:
            await self.channel_layer.group_discard(self.group, self.channel_name)

    async def receive_json(self, content: Any, **kwargs: Any) -> None:
        """Clients have nothing to say here."""

    async def push(self, event: dict[str, Any]) -> None:
        await self.send_json(event["message"])


class DashboardConsumer(_GroupConsumer):
    """`{"type": "changed"}` whenever a migration or an instance changed."""

    group = DASHBOARD_GROUP


class MigrationConsumer(_GroupConsumer):
    """Begins with the job as it is; then whatever happens to it."""

    async def open(self) -> None:
        job_id = self.scope["url_route"]["kwargs"]["job_id"]
        group = job_group(job_id)
        # Joined before the snapshot is read: nothing falls between the two.
        await self.channel_layer.group_add(group, self.channel_name)
        self.group = group
        try:
            job = await self._snapshot(job_id)
        except MigrationJob.DoesNotExist:
            await self.close(code=NOT_FOUND)
            return
        await self.accept()
        await self.send_json({"type": "job", "job": job})

    @database_sync_to_async
    def _snapshot(self, job_id: Any) -> dict[str, Any]:
        return plain(JobSerializer(get_job(job_id)).data)
