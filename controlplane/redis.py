"""The panel's connection to Redis, and the names of what lives there (docs/protocol.md, section 6)."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit, urlunsplit

import redis

__all__ = ["ACKS_KEY", "ROUTING_CHANNEL", "ROUTING_KEY", "STREAMS_PREFIX", "connection", "with_database"]

ROUTING_KEY = "vllm_hi:routing"
ROUTING_CHANNEL = "vllm_hi:routing"
ACKS_KEY = "vllm_hi:routing:acks"
STREAMS_PREFIX = "vllm_hi:streams:"


def with_database(url: str, number: int) -> str:
    """Returns `url` with another database number; a `unix://` URL is returned as it is."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        return url
    return urlunsplit(parts._replace(path=f"/{number}"))


@lru_cache(maxsize=4)
def _pooled(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True, socket_timeout=3, socket_connect_timeout=2)


def connection() -> redis.Redis:
    """Returns the process's pooled connection. Calls on it raise `redis.RedisError` when Redis is away."""
    from django.conf import settings

    return _pooled(settings.REDIS_URL)
