"""A client on the other side of an ASGI server, without the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[dict[str, Any]], Awaitable[None]]], Any]


class Exchange:
    """One request to an ASGI application and what has come back so far. Like Daphne, it does not cancel the app."""

    def __init__(self, app: App, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.complete = False
        self.accepting = asyncio.Event()
        self.accepting.set()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._changed = asyncio.Condition()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))
        self.task.add_done_callback(lambda _: asyncio.ensure_future(self._notify()))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _send(self, message: dict[str, Any]) -> None:
        await self.accepting.wait()
        if message["type"] == "http.response.start":
            assert not self.status, "a second response start"
            self.status = message["status"]
            self.headers = [(k.decode(), v.decode()) for k, v in message["headers"]]
        else:
            assert self.status and not self.complete, "body before the start or after the end"
            self.body += message.get("body", b"")
            self.complete = not message.get("more_body", False)
        await self._notify()

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k == name), None)

    def leave(self) -> None:
        """The client closes its connection."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed, asyncio.timeout(20.0):
            await self._changed.wait_for(condition)

    async def contains(self, text: str, count: int = 1) -> None:
        """Waits until the body contains `text` at least `count` times."""
        await self.until(lambda: self.body.count(text.encode()) >= count)

    async def end(self) -> bytes:
        """Waits until the application has returned; re-raises what it raised."""
        async with asyncio.timeout(20.0):
            await self.task
        return self.body

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends requests to an application."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._exchanges: list[Exchange] = []

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Exchange:
        exchange = Exchange(self._app, method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        self._exchanges.append(exchange)
        return exchange

    def post(self, path: str, body: Any, **headers: str) -> Exchange:
        return self.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)

    def chat(self, **fields: Any) -> Exchange:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, **fields: Any) -> Exchange:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True, **fields})

    async def close(self) -> None:
        for exchange in self._exchanges:
            exchange.accepting.set()
            exchange.leave()
            with contextlib.suppress(Exception):
                await exchange.end()
