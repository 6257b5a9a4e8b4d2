"""The HTTP server of a standby, which can be taken off its port and put back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

__all__ = ["PortTaken", "StandbyListener"]

START_POLL_S = 0.01


class PortTaken(OSError):
    """Somebody else has the port; the text is for humans."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The signals are the standby's business.
        yield


class StandbyListener:
    """Serves `app` on `host:port` between `start` and `stop`, which may alternate any number of times.

    The port stays bound from `hold` to `release`, so that nobody else gets it. The engine can bind it too, for it does
    so with SO_REUSEPORT, as we do; those who only bind it get no connections.
    """

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._hold: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def hold(self) -> None:
        """Takes the port, without listening there.

        Raises:
            PortTaken: somebody else has it.
        """
        # Two that both share the port would each get half of the connections: whoever is there already wins.
        self._bind(shared=False).close()
        self._hold = self._bind(shared=True)

    async def start(self) -> None:
        """Returns when connections are accepted. After `hold`."""
        if self._serving is not None:
            return
        config = uvicorn.Config(
            self._app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bind(shared=True)]))
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(START_POLL_S)

    async def stop(self) -> None:
        """Finishes what is under way and accepts nothing more."""
        serving, self._serving = self._serving, None
        if serving is not None and self._server is not None:
            self._server.should_exit = True
            await serving

    def release(self) -> None:
        """Gives the port back."""
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _bind(self, *, shared: bool) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((self._host, self._port))
        except OSError as error:
            sock.close()
            where = f"{self._host or '0.0.0.0'}:{self._port}"
            raise PortTaken(f"{where} cannot be used ({error.strerror}): choose another --port") from error
        return sock
