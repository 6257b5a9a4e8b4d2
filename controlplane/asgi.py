"""The ASGI entry: `/v1/*` goes to the proxy untouched by Django, the rest to Django and its websockets.

The proxy starts with the first scope of any kind, so that its control connections stand before the first request
has to be moved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.dev")

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.core.asgi import get_asgi_application

django_application = get_asgi_application()

from django.conf import settings  # noqa: E402

from controlplane.routing import websocket_urlpatterns  # noqa: E402
from proxy.app import ProxyApp, create_proxy  # noqa: E402
from proxy.settings import ProxySettings  # noqa: E402

__all__ = ["application"]

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Application:
    """Dispatches one scope."""

    def __init__(self, panel: Callable[..., Awaitable[None]], proxy: ProxyApp) -> None:
        self._panel = panel
        self._proxy = proxy
        self._starting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_proxy())
        if scope["type"] == "http" and (scope["path"] == "/v1" or scope["path"].startswith("/v1/")):
            await self._proxy(scope, receive, send)
        else:
            await self._panel(scope, receive, send)

    async def _start_proxy(self) -> None:
        try:
            await self._proxy.start()
        except Exception:
            # The panel must come up without the proxy; the next /v1 request starts it again.
            logger.exception("The proxy did not start")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._proxy.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self._proxy.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


application = Application(
    ProtocolTypeRouter(
        {
            "http": django_application,
            "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
        }
    ),
    create_proxy(
        ProxySettings(
            redis_url=settings.REDIS_URL,
            join_token=settings.VLLM_HI_TOKEN,
            worker_id=f"panel-{os.getpid()}-{secrets.token_hex(3)}",
        )
    ),
)
