"""What all HTTP calls of an instance share: the join token, the body, and the shape of a refusal.

With an engine they are served by `endpoints.py`, without one by `standby_app.py`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse

__all__ = ["MAX_BODY", "Call", "CallRefused", "Handler", "Name", "bad_field", "guarded", "read_body"]

MAX_BODY = 1024 * 1024

_FIELD_PATH = re.compile(r"at `\$\.([^`]+)`")
_FIELD_NAME = re.compile(r"field `([^`]+)`")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Handler = Callable[[Request], Awaitable[JSONResponse]]


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """Every migration call says on behalf of which attempt of which job it comes."""

    job: Name
    attempt: Annotated[int, msgspec.Meta(ge=1)]


class CallRefused(Exception):
    """A call that is answered with an error of our shape."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": code, "message": message, "param": param}}


def guarded(token: str, handler: Handler) -> Handler:
    """`handler` for callers that have the join token; its refusals become answers."""

    async def guarded(request: Request) -> JSONResponse:
        try:
            _authenticate(request, token)
            return await handler(request)
        except CallRefused as refusal:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
            return JSONResponse(refusal.body, refusal.status, headers)

    return guarded


async def read_body(request: Request) -> bytes:
    """Raises CallRefused: 413 `body_too_large`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise CallRefused(413, "body_too_large", f"The body may have {MAX_BODY} bytes at most.")
    return bytes(body)


def bad_field(error: msgspec.MsgspecError) -> CallRefused:
    """400 `bad_field` that names the field which could not be decoded."""
    text = str(error)
    name = _FIELD_NAME.search(text)
    path = _FIELD_PATH.search(text)
    parts = [match.group(1) for match in (path, name) if match]
    param = ".".join(parts) or None
    return CallRefused(400, "bad_field", f"{param or 'The body'}: {text}; see the protocol for this call.", param)


def _authenticate(request: Request, token: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Both sides as bytes: compare_digest refuses text that is not ASCII.
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
        raise CallRefused(
            401, "wrong_token", "Send the join token (VLLM_HI_TOKEN) as Authorization: Bearer.", "Authorization"
        )
