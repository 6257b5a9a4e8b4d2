"""Which headers pass through the proxy, and which do not."""

from __future__ import annotations

import re
from collections.abc import Iterable

from multidict import CIMultiDict

__all__ = ["RawHeaders", "from_upstream", "request_id", "to_upstream"]

RawHeaders = list[tuple[bytes, bytes]]

#: RFC 9110 section 7.6.1, and what older software still sends.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
#: Ours to set: the body is written anew, events are read (so not compressed), each leg has an id of its own. Cookies
#: belong to the panel, which shares its origin with the proxy.
NOT_FORWARDED = HOP_BY_HOP | {
    "host",
    "content-length",
    "accept-encoding",
    "x-request-id",
    "expect",
    "cookie",
    "x-csrftoken",
}
#: The ASGI server writes these itself.
NOT_RETURNED = HOP_BY_HOP | {"date", "server", "set-cookie", "x-request-id", "x-vllm-hi-stream"}

_PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _named_in_connection(values: Iterable[str]) -> set[str]:
    return {name.strip().lower() for value in values for name in value.split(",")}


def to_upstream(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Returns the client's headers without those that must not reach an instance."""
    text = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    drop = NOT_FORWARDED | _named_in_connection(value for name, value in text if name == "connection")
    return CIMultiDict((name, value) for name, value in text if name not in drop)


def from_upstream(headers: Iterable[tuple[bytes, bytes]], *, rewritten: bool) -> RawHeaders:
    """Returns an instance's headers for the client; `rewritten` says that the body's length may change."""
    kept = [(name.lower(), value) for name, value in headers]
    drop = NOT_RETURNED | _named_in_connection(v.decode("latin-1") for n, v in kept if n == b"connection")
    if rewritten:
        drop = drop | {"content-length"}
    return [(name, value) for name, value in kept if name.decode("latin-1") not in drop]


def request_id(headers: Iterable[tuple[bytes, bytes]], default: str) -> bytes:
    """Returns the client's `x-request-id` if it is a plain one, else `default`."""
    for name, value in headers:
        if name.lower() == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return value
    return default.encode()
