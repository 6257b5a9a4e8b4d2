"""What all streams of a worker share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.live import LiveStreams
from proxy.routing import Routing
from proxy.settings import ProxySettings

__all__ = ["Context", "Send"]

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Context:
    """The parts of one worker, and `spawn`, which runs something that nobody waits for."""

    settings: ProxySettings
    session: aiohttp.ClientSession
    routing: Routing
    live: LiveStreams
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
