"""The streams that clients of this worker have open, and what became of recent handovers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

from redis.exceptions import RedisError

from proxy.routing import REDIS_TIMEOUT_S, close_redis, connect_redis
from proxy.settings import ProxySettings

if TYPE_CHECKING:
    from proxy.stream import LiveStream

__all__ = ["LiveStreams", "Outcome"]

log = logging.getLogger(__name__)

Outcome = Literal["switched", "discarded"]

PUBLISH_EVERY_S = 1.0
EXPIRES_S = 5
#: How many handovers are remembered, so that a late `Resolve` gets the true answer.
REMEMBERED = 10_000


class LiveStreams:
    """Streams by id, and the outcome of each ticket."""

    def __init__(self) -> None:
        self._streams: dict[str, LiveStream] = {}
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()

    def add(self, stream: LiveStream) -> None:
        self._streams[stream.stream_id] = stream

    def remove(self, stream: LiveStream) -> None:
        self._streams.pop(stream.stream_id, None)

    def get(self, stream_id: str) -> LiveStream | None:
        return self._streams.get(stream_id)

    def decide(self, ticket: str, outcome: Outcome) -> None:
        """Records what became of `ticket`; the first decision stands."""
        self._outcomes.setdefault(ticket, outcome)
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)

    def decided(self, ticket: str) -> bool:
        """Whether a second leg with this ticket was opened and has ended, one way or the other."""
        return ticket in self._outcomes

    def outcome(self, ticket: str) -> Outcome:
        """Returns the outcome of a ticket that has no open second leg any more."""
        return self._outcomes.get(ticket, "discarded")

    def instances_in_use(self) -> set[str]:
        return {instance_id for stream in self._streams.values() for instance_id in stream.instances}

    def describe(self) -> list[dict[str, Any]]:
        """Returns `{stream_id, model, instance, tokens, age_s, last_token_age_s, legs}` per stream; ages in seconds."""
        return [stream.describe() for stream in self._streams.values()]

    async def publish(self, settings: ProxySettings) -> None:
        """Writes the list to Redis each second until cancelled."""
        key = f"{settings.key_prefix}streams:{settings.worker_id}"
        client = connect_redis(settings.redis_url)
        try:
            while True:
                try:
                    async with asyncio.timeout(REDIS_TIMEOUT_S):
                        await client.set(key, json.dumps(self.describe()), ex=EXPIRES_S)
                except (RedisError, OSError, TimeoutError) as error:
                    log.debug("stream list not published: %s", error)
                await asyncio.sleep(PUBLISH_EVERY_S)
        finally:
            await close_redis(client)
