"""A vLLM instance with our plugin, as the proxy sees it: an OpenAI-like server and a control port.

Generation is driven by the test: `Generation.release()` lets events out, `commit()` wakes a parked request. Paths in
`recorded` answer with two recorded streams, the second one on a second leg.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tests.fakes.answers import MODEL, Shape, Token, document, events
from vllm_plugin.wire import (
    PROTOCOL_VERSION,
    Auth,
    Hello,
    Ping,
    ProtocolError,
    Refused,
    check_auth,
    decode_frame,
    encode_frame,
    read_frame_async,
)

Message = TypeVar("Message", bound=msgspec.Struct)

EVERYTHING = 1_000_000
PATIENCE_S = 20.0


@dataclass
class Generation:
    """One request that the instance has received."""

    body: dict[str, Any]
    headers: dict[str, str]
    request: web.Request
    allowed: int = 0
    groups: list[int] | None = None
    status: int = 0
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    extra: list[bytes] = field(default_factory=list)

    @property
    def stream_id(self) -> str:
        return str(self.body["vllm_xargs"]["vllm_hi_stream"]).split("/")[1]

    @property
    def ticket(self) -> str | None:
        return (self.body.get("vllm_xargs") or {}).get("vllm_hi_ticket")

    def release(self, count: int = EVERYTHING) -> None:
        """Lets `count` more events out."""
        self.allowed += count
        self.changed.set()

    def commit(self, *groups: int) -> None:
        """Un-parks the request; its first events carry `groups` tokens each, the rest one by one."""
        self.groups = list(groups)
        self.committed.set()
        self.changed.set()

    def refuse(self, status: int) -> None:
        """Answers a parked request with an HTTP error."""
        self.status = status
        self.committed.set()

    def insert(self, event: bytes) -> None:
        """Writes an event of the test's own, ahead of what is released next."""
        self.extra.append(event)
        self.changed.set()

    def die(self) -> None:
        """Breaks the connection without an end."""
        transport = self.request.transport
        assert transport is not None
        transport.abort()

    async def permit(self) -> None:
        while self.allowed <= 0 and not self.extra:
            self.changed.clear()
            await self.changed.wait()
        if not self.extra:
            self.allowed -= 1


class FakeInstance:
    """Runs on two ephemeral ports of the loopback interface."""

    def __init__(self, name: str, token: str, tokens: list[Token], *, manual: bool = True) -> None:
        self.name = name
        self.tokens = tokens
        self.manual = manual
        self.generations: list[Generation] = []
        self.received: list[msgspec.Struct] = []
        self.connections: list[Auth] = []
        self.refused: list[str] = []
        self.recorded: dict[str, tuple[list[bytes], list[bytes]]] = {}
        self.body_gate = asyncio.Event()
        self.body_gate.set()
        self._token = token
        self._changed = asyncio.Condition()
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._server = await asyncio.start_server(self._control, "127.0.0.1", 0)
        self.control_port: int = self._server.sockets[0].getsockname()[1]

    async def stop_serving(self) -> None:
        """Closes the HTTP port; the control port stays open."""
        await self._runner.cleanup()

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._readers):
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._runner.cleanup()

    def row(self, role: str = "active") -> dict[str, Any]:
        """Returns this instance's entry of a routing table."""
        return {
            "base_url": self.base_url,
            "control_host": "127.0.0.1",
            "control_port": self.control_port,
            "served_model_name": MODEL,
            "role": role,
        }

    # -- OpenAI --------------------------------------------------------------------------------------------------------

    async def generation(self, number: int = 0) -> Generation:
        """Waits for the request with this number, counted from 0."""
        await self._until(lambda: len(self.generations) > number)
        return self.generations[number]

    async def _post(self, request: web.Request) -> web.StreamResponse:
        await self.body_gate.wait()
        body = await request.json()
        generation = Generation(body, {name.lower(): value for name, value in request.headers.items()}, request)
        if not self.manual:
            generation.release()
        async with self._changed:
            self.generations.append(generation)
            self._changed.notify_all()
        try:
            return await self._answer(request, generation)
        finally:
            generation.gone.set()

    async def _answer(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        body = generation.body
        if body.get("max_tokens") == -1:
            error = {"error": {"message": "max_tokens must be positive", "type": "BadRequestError", "code": 400}}
            return web.json_response(error, status=400, headers={"X-Upstream": self.name})
        if generation.ticket is not None:
            await generation.committed.wait()
            if generation.status:
                return web.json_response({"error": {"message": "no"}}, status=generation.status)
        if request.path in self.recorded and body.get("stream"):
            return await self._stream(request, self._replay(generation, *self.recorded[request.path]))
        if not request.path.endswith("/completions"):
            if request.path in self.recorded:
                await generation.permit()
            return web.json_response({"path": request.path, "body": body})
        shape = Shape(
            chat="messages" in body,
            ids=bool(body.get("return_token_ids")),
            logprobs=bool(body.get("logprobs")),
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
            hold=3 if body.get("stop") else 0,
        )
        answer_id = f"chatcmpl-{request.headers['X-Request-Id']}"
        if not body.get("stream"):
            await generation.permit()
            return web.json_response(document(self.tokens, shape, answer_id))
        return await self._stream(request, self._chunks(generation, shape, answer_id))

    async def _stream(self, request: web.Request, chunks: AsyncIterator[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _replay(self, generation: Generation, fine: list[bytes], coarse: list[bytes]) -> AsyncIterator[bytes]:
        """A recorded answer: token by token on a first leg, in larger events on a second one."""
        for chunk in coarse if generation.ticket else fine:
            await generation.permit()
            while generation.extra:
                yield generation.extra.pop(0)
                await generation.permit()
            yield chunk

    async def _chunks(self, generation: Generation, shape: Shape, answer_id: str) -> AsyncIterator[bytes]:
        first = generation.groups or []
        groups = [*first, *[1] * (len(self.tokens) - sum(first))]
        created = len(self.generations) + (1000 if generation.ticket else 0)
        for chunk in events(self.tokens, groups, shape, answer_id, created):
            await generation.permit()
            while generation.extra:
                yield generation.extra.pop(0)
                await generation.permit()
            yield chunk

    # -- control port --------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        """Sends to the proxy over the newest control connection."""
        self._writers[-1].write(encode_frame(message))

    async def connected(self, times: int = 1) -> None:
        await self._until(lambda: len(self.connections) >= times)

    async def expect(self, kind: type[Message], number: int = 0) -> Message:
        """Waits for a message of the proxy: the one of this kind with this number, counted from 0."""
        await self._until(lambda: len(self.all(kind)) > number)
        return self.all(kind)[number]

    def all(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.received if isinstance(message, kind)]

    def hang_up(self) -> None:
        self._writers[-1].close()

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            hello = Hello(PROTOCOL_VERSION, secrets.token_bytes(32))
            writer.write(encode_frame(hello))
            try:
                body = await read_frame_async(reader)
                auth, welcome = check_auth(msgspec.msgpack.decode(body, type=Auth), hello, self._token, self.name)
            except ProtocolError as error:
                writer.write(encode_frame(Refused(error.code, error.message)))
                await self._note(self.refused, error.code)
                return
            writer.write(encode_frame(welcome))
            self._writers.append(writer)
            await self._note(self.connections, auth)
            while True:
                message = decode_frame(await read_frame_async(reader))
                if not isinstance(message, Ping):
                    await self._note(self.received, message)
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            async with self._changed:
                self._readers.discard(task)
                self._changed.notify_all()
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def disconnected(self) -> None:
        """Waits until the proxy has no control connection any more."""
        await self._until(lambda: not self._readers)

    async def _note(self, where: list[Any], what: Any) -> None:
        async with self._changed:
            where.append(what)
            self._changed.notify_all()

    async def _until(self, condition: Any) -> None:
        async with self._changed, asyncio.timeout(PATIENCE_S):
            await self._changed.wait_for(condition)
