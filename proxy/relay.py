"""Plain relay for the API paths whose requests are never moved."""

from __future__ import annotations

import asyncio
import logging

from proxy.context import Context, Send
from proxy.errors import upstream_lost
from proxy.headers import RawHeaders, from_upstream, request_id, to_upstream
from proxy.leg import Leg
from proxy.tags import ClientRequest

__all__ = ["relay_plain"]

log = logging.getLogger(__name__)


async def relay_plain(
    context: Context, request: ClientRequest, path: str, headers: RawHeaders, send: Send, id_: str
) -> None:
    """Sends the request to an instance of its model and its answer back as it comes.

    Raises:
        ApiError: nothing has been sent yet, and this is the answer.
        ConnectionError: the answer broke off; the server must close the client's connection.
    """
    route = context.routing.choose(request.model)
    wake = asyncio.Event()
    upstream_headers = to_upstream(headers)
    upstream_headers["Content-Type"] = "application/json"
    upstream_headers["X-Request-Id"] = id_
    leg = Leg(
        context.session,
        "POST",
        route.base_url.rstrip("/") + path,
        upstream_headers,
        request.plain(),
        lambda _: wake.set(),
        context.settings.max_buffered_bytes,
        route.instance_id,
    )
    context.routing.load[route.instance_id] += 1
    acknowledged = started = False
    try:
        while True:
            wake.clear()
            if not acknowledged and (leg.written or leg.ended):
                acknowledged = True
                context.routing.sent(route)
            if leg.head is not None and not started:
                started = True
                answer = from_upstream(leg.head.headers, rewritten=False)
                answer.append((b"x-request-id", request_id(headers, id_)))
                await send({"type": "http.response.start", "status": leg.head.status, "headers": answer})
            elif started and (chunk := leg.take()) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            elif leg.ended == "complete":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif leg.ended == "broken":
                log.warning("no answer from %s: %s", leg.url, leg.error)
                if started:
                    raise ConnectionError(f"{leg.url} broke off its answer")
                raise upstream_lost()
            else:
                await wake.wait()
    finally:
        leg.close()
        context.routing.load[route.instance_id] -= 1
        if not acknowledged:
            context.routing.sent(route)
