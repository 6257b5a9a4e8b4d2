"""The ASGI application: what a path means, and the life of a proxy worker."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from proxy.context import Context, Send
from proxy.control import ControlLink, ControlLinks
from proxy.errors import ApiError, model_not_found
from proxy.leg import client_session
from proxy.live import LiveStreams
from proxy.movable import MOVABLE_PATHS
from proxy.relay import relay_plain
from proxy.routing import Routing, RoutingTable
from proxy.settings import ProxySettings
from proxy.stream import LiveStream
from proxy.tags import parse_request
from vllm_plugin.wire import CloseLeg, Freezing, LegOpened, OpenLeg, Producing, ProxyMessage, Resolve, Resolved

__all__ = ["ProxyApp", "create_proxy"]

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]

#: A list of what is served, not of what is forbidden: instances have operator calls under /v1, too.
RELAYED = frozenset(
    f"/v1/{name}"
    for name in (
        "classify",
        "detokenize",
        "embeddings",
        "messages/count_tokens",
        "pooling",
        "rerank",
        "score",
        "tokenize",
    )
)


def create_proxy(settings: ProxySettings) -> ProxyApp:
    """Returns an ASGI application for http scopes; the first one, or `start()`, starts its background work."""
    return ProxyApp(settings)


class ProxyApp:
    """One proxy worker. Belongs to the event loop in which it was started."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.live = LiveStreams()
        self.links = ControlLinks(settings, self._control)
        self.routing = Routing(settings, self.links.connected)
        self.routing.on_change(self._dial)
        self._context: Context | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts following the routing table and dialling instances; does nothing the second time."""
        if self._context is not None:
            return
        session = client_session(self.settings.connect_timeout_s)
        self._context = Context(self.settings, session, self.routing, self.live, self._spawn)
        self._spawn(self.routing.follow())
        self._spawn(self.live.publish(self.settings))
        self._spawn(self._hang_up_unused())

    async def stop(self) -> None:
        """Ends all background work and closes every connection."""
        if self._context is None:
            return
        context, self._context = self._context, None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()
        await context.session.close()

    def streams(self) -> list[dict[str, Any]]:
        """Returns the live streams: `{stream_id, model, instance, tokens, age_s, last_token_age_s, legs}` each."""
        return self.live.describe()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the proxy serves http, not {scope['type']}")
        await self.start()
        started = False

        async def tracked(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, tracked)
        except ApiError as error:
            if started:
                raise
            await _answer(send, error.status, error.body(scope["path"]), error.headers)
        except Exception:
            if started:
                raise
            log.exception("%s %s", scope["method"], scope["path"])
            failure = ApiError(500, "The proxy failed to handle the request; see its log.", type_="server_error")
            await _answer(send, failure.status, failure.body(scope["path"]))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path == "/v1/models" or path.startswith("/v1/models/"):
            _only(method, "GET")
            await _answer(send, 200, json.dumps(self._models(path[len("/v1/models/") :])).encode())
            return
        if path not in MOVABLE_PATHS and path not in RELAYED:
            raise ApiError(404, f"There is no {path} here.", type_="NotFoundError", code="unknown_url")
        _only(method, "POST")
        raw = await self._read(receive)
        if raw is None:
            return
        request = parse_request(path, raw)
        request = request.asking_for(self.routing.served_as(request.model))
        assert self._context is not None
        headers = list(scope["headers"])
        target = path + ("?" + scope["query_string"].decode("latin-1") if scope.get("query_string") else "")
        if path in MOVABLE_PATHS:
            work = LiveStream(self._context, request, target, headers, send).serve()
        else:
            work = relay_plain(self._context, request, target, headers, send, uuid.uuid4().hex)
        await _unless_client_leaves(work, receive)

    def _models(self, name: str) -> dict[str, Any]:
        models = self.routing.models()
        if not name:
            return {"object": "list", "data": models}
        for model in models:
            if model["id"] == name:
                return model
        raise model_not_found(name)

    async def _read(self, receive: Receive) -> bytes | None:
        """Returns the request's body, None if the client left."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.settings.max_body_bytes:
                limit = self.settings.max_body_bytes
                raise ApiError(413, f"The request body has more than {limit} bytes.", code="body_too_large")
            if not message.get("more_body"):
                return b"".join(parts)

    # -- background work -----------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background task failed", exc_info=task.exception())

    def _dial(self, table: RoutingTable) -> None:
        self.links.follow(table.instances, self.live.instances_in_use())

    async def _hang_up_unused(self) -> None:
        while True:
            await asyncio.sleep(self.settings.poll_s)
            self._dial(self.routing.table)

    def _control(self, link: ControlLink, message: ProxyMessage) -> None:
        """Handles one message of an instance; never waits."""
        if not isinstance(message, OpenLeg | Freezing | CloseLeg | Resolve | Producing):
            return
        stream = self.live.get(message.stream_id)
        match message, stream:
            case OpenLeg(), None:
                link.send(LegOpened(message.call, False, "unknown_stream", "no client has such a stream open here"))
            case Resolve(), None:
                link.send(Resolved(message.call, self.live.outcome(message.ticket)))
            case OpenLeg(), LiveStream():
                stream.open_leg(message, link)
            case Freezing(), LiveStream():
                stream.freezing(message)
            case CloseLeg(), LiveStream():
                stream.close_leg(message.ticket)
            case Resolve(), LiveStream():
                stream.resolve(message, link)
            case Producing(), LiveStream():
                stream.producing(message)


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        headers = ((b"allow", allowed.encode()),)
        raise ApiError(405, f"Use {allowed} here, not {method}.", code="method_not_allowed", headers=headers)


async def _answer(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _unless_client_leaves(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`, and cancels it as soon as the client is gone: servers do not, or only seconds later."""

    async def client_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(client_left())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
