"""Parties that do not keep to the protocol although they hold the join token: a proxy worker and a peer."""

from __future__ import annotations

import itertools
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from controlplane.serving import Instance
from tests.engine.conftest import RunningStack
from vllm_plugin.data_messages import Reach, Reached, decode_data
from vllm_plugin.link import Link
from vllm_plugin.messages import decode_peer
from vllm_plugin.wire import FrameSocket, LegOpened, OpenLeg, Producing, ProtocolError, Switched, decode_frame

__all__ = ["ByHand", "Impostor", "Relay", "data_port"]

HOST = "127.0.0.1"


class ByHand:
    """A migration that a test drives call by call, as the control plane would."""

    def __init__(self, stack: RunningStack, job: str, source: Instance, target: Instance, **peer: Any) -> None:
        self.stack = stack
        self.job = job
        self.source = source
        self.target = target
        control_port = stack.status(target)["control_port"]
        self.peer = {"vllm_hi_id": target.id, "host": HOST, "control_port": control_port, "base_url": target.base_url}
        self.peer |= peer

    def call(self, operation: str, **fields: Any) -> httpx.Response:
        body = {"job": self.job, "attempt": 1, **fields}
        return self.stack.instance_post(self.source, f"/vllm_hi/migration/{operation}", body)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keeps a session open; whatever has not moved by its end is rolled back."""
        started = self.call("start", peer=self.peer, lease_s=20)
        assert started.status_code == 200, started.text
        try:
            yield
        finally:
            self.call("abort")


class Impostor:
    """A proxy worker that a test plays: it owns one client's connection to A and may misuse the ticket it gets for it.

    `tokens`: what that client has received. `asked`: requests of A for a second leg.
    """

    _numbers = itertools.count()

    def __init__(self, stack: RunningStack, source: Instance, target: Instance) -> None:
        # A name of its own: an instance may not yet have noticed that an earlier impostor has gone.
        self.name = name = f"impostor-{next(self._numbers)}"
        self.tokens: list[int] = []
        self.asked: queue.Queue[OpenLeg] = queue.Queue()
        self.over = threading.Event()
        self._model = stack.model
        self._source = source
        self._links = [self._dial(stack, instance) for instance in (source, target)]
        stack.until(lambda: all(name in stack.status(one)["proxies"] for one in (source, target)))

    def _dial(self, stack: RunningStack, instance: Instance) -> Link:
        port = stack.status(instance)["control_port"]
        frames = FrameSocket.dial(HOST, port, stack.join_token, "proxy", self.name)
        frames.sock.settimeout(None)
        return Link(frames, instance.letter, decode_frame, (), self._on_message, lambda _: None).start()

    def _on_message(self, link: Link, message: Any) -> None:
        if isinstance(message, OpenLeg):
            link.send(LegOpened(message.call, True))
            self.asked.put(message)
        elif isinstance(message, Producing):
            self._links[0].send(Switched(message.stream_id, message.ticket, message.tokens))

    def close(self) -> None:
        for link in self._links:
            link.close()

    def body(self, stream: str, ticket: str | None = None, **changes: Any) -> dict[str, Any]:
        """The client's request as one leg gets it."""
        extra = {"vllm_hi_stream": f"{self.name}/{stream}"} | ({"vllm_hi_ticket": ticket} if ticket else {})
        return {
            "model": self._model,
            "prompt": "The harbour master counted the ships twice before the fog came in.",
            "max_tokens": 160,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "vllm_xargs": extra,
            **changes,
        }

    def start(self, stream: str) -> None:
        """Sends the first leg; `tokens` fill up."""
        self.tokens, self.over = [], threading.Event()
        threading.Thread(target=self._read, args=(self.body(stream), self.tokens, self.over), daemon=True).start()

    def _read(self, body: dict[str, Any], tokens: list[int], over: threading.Event) -> None:
        url = self._source.base_url + "/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            tokens += choice.get("token_ids") or []
        finally:
            over.set()


class Relay:
    """Stands between A and B on the control connection and changes what they say. A dials `port` in the belief that it
    is B. `change(message)` returns what is passed on; None swallows it."""

    def __init__(self, stack: RunningStack, target: Instance, change: Callable[[Any], Any]) -> None:
        self._token = stack.join_token
        self._target_port = stack.status(target)["control_port"]
        self._change = change
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._ends: list[FrameSocket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        for frames in self._ends:
            frames.close()

    def _serve(self) -> None:
        try:
            sock, _ = self._server.accept()
            source, auth = FrameSocket.accept(sock, self._token, "relay")
            target = FrameSocket.dial(HOST, self._target_port, self._token, "peer", auth.name)
        except (OSError, ProtocolError):
            return
        target.sock.settimeout(None)
        self._ends += [source, target]
        threading.Thread(target=self._pass_on, args=(target, source), daemon=True).start()
        self._pass_on(source, target)

    def _pass_on(self, from_: FrameSocket, to: FrameSocket) -> None:
        try:
            while True:
                message = self._change(decode_peer(from_.receive_body()))
                if message is not None:
                    to.send(message)
        except (OSError, ProtocolError):
            from_.close()
            to.close()


@contextmanager
def data_port(token: str, serve: Callable[[FrameSocket, Any], None]) -> Iterator[int]:
    """A false data server of a worker: `serve(frames, first message after the transport is agreed)` for each
    connection."""
    server = socket.create_server((HOST, 0))

    def run() -> None:
        while True:
            try:
                sock, _ = server.accept()
                frames, _ = FrameSocket.accept(sock, token, "false worker")
                message = decode_data(frames.receive_body())
                if isinstance(message, Reach):
                    frames.send(Reached("tcp", True, "a false worker has no memory to show"))
                    message = decode_data(frames.receive_body())
                serve(frames, message)
                frames.close()
            except (OSError, ProtocolError, msgspec.MsgspecError):
                if server.fileno() < 0:
                    return

    threading.Thread(target=run, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()
