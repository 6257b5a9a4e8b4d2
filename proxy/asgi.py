"""The proxy alone, in a process of its own: `uvicorn proxy.asgi:application --port 8003`.

Inside the panel's process it shares an interpreter with Django, whose work every stream then waits for. Any number of
these may run, behind one port or several; each is a worker with a control connection to every instance. Configured by
`REDIS_URL` and `VLLM_HI_TOKEN`, as the panel is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.app import ProxyApp, create_proxy
from proxy.settings import ProxySettings

__all__ = ["application"]

Message = dict[str, Any]


class Standalone:
    """Starts the proxy with its server, and answers nothing but `/v1`."""

    def __init__(self, proxy: ProxyApp) -> None:
        self._proxy = proxy

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "lifespan":
            await self._proxy(scope, receive, send)
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._proxy.start()
            else:
                await self._proxy.stop()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return


def _settings() -> ProxySettings:
    """Raises: ValueError when the token is missing."""
    return ProxySettings(
        redis_url=os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"),
        join_token=os.environ.get("VLLM_HI_TOKEN", ""),
        worker_id=f"proxy-{os.getpid()}-{secrets.token_hex(3)}",
    )


application = Standalone(create_proxy(_settings()))
