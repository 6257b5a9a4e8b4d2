"""A control connection with a reader thread, a writer queue and numbered calls: sending never blocks the caller."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import msgspec

from vllm_plugin.wire import FrameSocket, ProtocolError

__all__ = ["Link"]

logger = logging.getLogger("vllm.vllm_hi.link")


class Link:
    """One authenticated connection.

    `on_message(link, message)` gets everything that is not the answer to a call of ours, on the reader thread, in
    order. `on_close(link)` is called once, on the reader thread. Calls that are open by then fail with ConnectionError.
    """

    def __init__(
        self,
        frames: FrameSocket,
        name: str,
        decode: Callable[[bytearray], Any],
        answers: tuple[type, ...],
        on_message: Callable[[Link, Any], None],
        on_close: Callable[[Link], None],
    ) -> None:
        self.name = name
        self.closed = False
        self._frames = frames
        self._decode = decode
        self._answers = answers
        self._on_message = on_message
        self._on_close = on_close
        self._outgoing: queue.SimpleQueue[msgspec.Struct | None] = queue.SimpleQueue()
        self._numbers = count(1)
        self._open_calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def start(self) -> Link:
        """Starts reading and writing in two threads of its own."""
        threading.Thread(target=self._write, name=f"vllm-hi-write-{self.name}", daemon=True).start()
        threading.Thread(target=self.read, name=f"vllm-hi-read-{self.name}", daemon=True).start()
        return self

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; on a closed link it is dropped, as it would be in a lost connection."""
        if not self.closed:
            self._outgoing.put(message)

    def call(self, build: Callable[[int], msgspec.Struct]) -> Future[Any]:
        """Sends `build(number)`; the future gets the answer with that number, or ConnectionError."""
        future: Future[Any] = Future()
        with self._lock:
            if self.closed:
                future.set_exception(ConnectionError(f"the connection to {self.name} is closed"))
                return future
            number = next(self._numbers)
            self._open_calls[number] = future
        self.send(build(number))
        return future

    def close(self) -> None:
        self._outgoing.put(None)
        self._frames.close()

    def read(self) -> None:
        try:
            while True:
                message = self._decode(self._frames.receive_body())
                if isinstance(message, self._answers):
                    with self._lock:
                        future = self._open_calls.pop(message.call, None)  # type: ignore[attr-defined]
                    if future is not None:
                        future.set_result(message)
                else:
                    self._on_message(self, message)
        except (OSError, ProtocolError) as error:
            logger.info("control connection of %s ended: %s", self.name, error)
        finally:
            self._end()

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._frames.send(message)
            except OSError:
                self._frames.close()
                return

    def _end(self) -> None:
        with self._lock:
            self.closed = True
            waiting, self._open_calls = list(self._open_calls.values()), {}
        for future in waiting:
            future.set_exception(ConnectionError(f"the connection to {self.name} was lost"))
        self.close()
        self._on_close(self)
