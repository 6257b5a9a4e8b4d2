"""One request to one instance, and the part of its answer that nobody has taken yet."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict

__all__ = ["Head", "Leg", "client_session"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """Status and raw headers of an instance's answer."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def is_events(self) -> bool:
        """Whether the answer is a stream of server-sent events that went well so far."""
        return self.status == 200 and any(
            name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in self.headers
        )


def client_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """Returns the session that all legs of a worker share: no read timeout, no cookies, no decompression."""
    return aiohttp.ClientSession(
        # Shorter than the 5 s after which an instance closes an idle connection, so that none is reused too late.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


class Leg:
    """Sends a request at once and collects the answer, at most `limit` bytes ahead of whoever takes it.

    Attributes:
        head: the answer's head, when there is one.
        written: the request has been handed to the network completely.
        ended: None while it runs, then "complete" or "broken".
        error: why it broke, for logs and for `LegOpened`.
        connect_failed: nothing of the request can have reached the instance.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: CIMultiDict[str],
        body: bytes,
        changed: Callable[[Leg], None],
        limit: int | None,
        instance_id: str = "",
    ) -> None:
        self.url = url
        self.instance_id = instance_id
        self.head: Head | None = None
        self.written = False
        self.ended: str | None = None
        self.error = ""
        self.connect_failed = False
        self._changed = changed
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._room = asyncio.Event()
        self._settled = asyncio.Event()
        self._response: aiohttp.ClientResponse | None = None
        self._task = asyncio.create_task(self._run(session, method, url, headers, body))

    def take(self) -> bytes | None:
        """Returns what has arrived since the last call, or None."""
        if not self._chunks:
            return None
        data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        self._chunks.clear()
        self._buffered = 0
        self._room.set()
        return data

    async def sent(self) -> bool:
        """Waits until the request is written (True) or it is clear that it will not be (False)."""
        await self._settled.wait()
        return self.written

    def close(self) -> None:
        """Closes the connection, which makes the instance abort; nothing can be taken any more."""
        self._chunks.clear()
        if self._response is not None and self.ended != "complete":
            self._response.close()
        if self.ended is None:
            # Not left to the task: one that is cancelled before its first step never runs its own clean-up.
            self.ended = "broken"
            self._settled.set()
        self._task.cancel()

    async def closed(self) -> None:
        """Waits until a closed leg holds no connection any more."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(
        self, session: aiohttp.ClientSession, method: str, url: str, headers: CIMultiDict[str], body: bytes
    ) -> None:
        if body:
            headers = headers.copy()
            headers["Content-Length"] = str(len(body))
        try:
            response = await session.request(
                method, url, data=self._body(body) if body else None, headers=headers, allow_redirects=False
            )
            self._response = response
            self._mark_written()
            self.head = Head(response.status, list(response.raw_headers))
            self._changed(self)
            while chunk := await response.content.readany():
                self._chunks.append(chunk)
                self._buffered += len(chunk)
                self._changed(self)
                await self._wait_for_room()
            self.ended = "complete"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.connect_failed = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            self.error = str(error) or type(error).__name__
            self.ended = "broken"
        except asyncio.CancelledError:
            self.ended = self.ended or "broken"
            raise
        except Exception:
            log.exception("leg to %s", url)
            self.error, self.ended = "internal error", "broken"
        finally:
            if self._response is not None:
                # Given back to the pool if the answer was read to its end, else closed.
                self._response.release() if self.ended == "complete" else self._response.close()
            self._settled.set()
            self._changed(self)

    async def _body(self, body: bytes) -> AsyncIterator[bytes]:
        # A generator is asked for more only after what it gave has been written, which is what `written` means; the
        # answer's head may come seconds later.
        yield body
        self._mark_written()

    def _mark_written(self) -> None:
        self.written = True
        self._settled.set()

    async def _wait_for_room(self) -> None:
        while self._limit is not None and self._buffered >= self._limit:
            self._room.clear()
            await self._room.wait()
