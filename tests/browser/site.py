"""The panel as browsers see it, with a stand-in for the proxy: `/v1` streams words at a steady pace."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.test")

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.core.asgi import get_asgi_application

django_application = get_asgi_application()

from controlplane.redis import STREAMS_PREFIX, connection  # noqa: E402
from controlplane.routing import websocket_urlpatterns  # noqa: E402

MODEL = "smollm2"
TOKEN_S = 0.03
#: The token at which the stand-in says that the stream moved to the other instance, and the pause of that moment.
MOVES_AT = 60
MOVE_GAP_S = 0.15
WORDS = ("the", "keeper", "wrote", "down", "what", "the", "sea", "had", "said")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _body(receive: Callable[[], Awaitable[Message]]) -> dict[str, Any]:
    received = b""
    while True:
        message = await receive()
        received += message.get("body", b"")
        if not message.get("more_body"):
            return dict(json.loads(received))


class StandInProxy:
    """Answers `/v1/models` and streamed `/v1/chat/completions`."""

    def __init__(self) -> None:
        self._streams = 0

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["path"] == "/v1/models":
            await _answer(send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        wish = await _body(receive)
        if wish["model"] != MODEL:
            await _answer(
                send, 404, {"error": {"message": f"There is no model {wish['model']}.", "code": "model_not_found"}}
            )
            return
        self._streams += 1
        await self._stream(f"stream-{self._streams:04d}", wish, send)

    async def _stream(self, stream_id: str, wish: dict[str, Any], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        # Every second one only, so that pages also have to find a stream by the id of its answer.
        if self._streams % 2:
            headers.append((b"x-vllm-hi-stream", stream_id.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        total = int(wish["max_tokens"])
        for index in range(total):
            moved = index >= MOVES_AT
            await asyncio.sleep(MOVE_GAP_S if index == MOVES_AT else TOKEN_S)
            row = {
                "stream_id": stream_id, "model": MODEL, "instance": "b-two" if moved else "a-one",
                "tokens": index, "age_s": index * TOKEN_S, "last_token_age_s": TOKEN_S, "legs": 1,
            }  # fmt: skip
            connection().set(f"{STREAMS_PREFIX}stand-in-{stream_id}", json.dumps([row]), ex=3)
            choice = {"index": 0, "delta": {"content": WORDS[index % len(WORDS)] + " "}, "token_ids": [index]}
            await self._event(send, {"id": f"chatcmpl-{stream_id}-1", "choices": [choice]})
        await self._event(send, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        await self._event(send, {"choices": [], "usage": {"completion_tokens": total}})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _event(self, send: Send, event: dict[str, Any]) -> None:
        body = f"data: {json.dumps(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


class Site:
    def __init__(self) -> None:
        self._panel = ProtocolTypeRouter(
            {
                "http": django_application,
                "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
            }
        )
        self._proxy = StandInProxy()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        to_proxy = scope["type"] == "http" and scope["path"].startswith("/v1/")
        await (self._proxy if to_proxy else self._panel)(scope, receive, send)


application = Site()
