"""Messages between proxy workers, engine cores and workers, and how they are framed and authenticated.

A frame is a 4-byte little-endian length followed by a msgpack-encoded tagged struct. `docs/protocol.md` says who sends
what and when. This module knows neither vLLM nor Django: the proxy imports it too.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from typing import Any, Literal

import msgspec

__all__ = [
    "PROTOCOL_VERSION",
    "Auth",
    "CloseLeg",
    "Discarded",
    "FirstToken",
    "FrameSocket",
    "Freezing",
    "Hello",
    "LegOpened",
    "OpenLeg",
    "Producing",
    "ProtocolError",
    "ProxyMessage",
    "Refused",
    "Resolve",
    "Resolved",
    "Switched",
    "Welcome",
    "answer_hello",
    "check_welcome",
    "decode_frame",
    "dial_async",
    "encode_frame",
    "read_frame_async",
]

PROTOCOL_VERSION = 4

#: Largest frame before and after the handshake, in bytes.
MAX_UNAUTHENTICATED_FRAME = 4 * 1024
MAX_FRAME = 64 * 1024 * 1024
HANDSHAKE_DEADLINE_S = 5.0

Role = Literal["proxy", "peer", "engine", "worker"]

_LENGTH = struct.Struct("<I")


class ProtocolError(ConnectionError):
    """The other side broke the protocol, or refused us; the connection is of no further use."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


# -- handshake ---------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello"):
    protocol: int
    nonce: bytes


class Auth(msgspec.Struct, tag="auth"):
    protocol: int
    role: Role
    name: str
    nonce: bytes
    mac: bytes


class Welcome(msgspec.Struct, tag="welcome"):
    name: str
    mac: bytes


class Refused(msgspec.Struct, tag="refused"):
    code: str
    message: str


# -- control connection of a proxy worker ------------------------------------------------------------------------------


class OpenLeg(msgspec.Struct, tag="open_leg"):
    """A asks the proxy to re-send a stream's original body to B with a single-use ticket.

    `tool_parser`, `reasoning_parser`: names of the parsers in A's front end, "" for none.
    """

    call: int
    stream_id: str
    ticket: str
    base_url: str
    tool_parser: str = ""
    reasoning_parser: str = ""


class LegOpened(msgspec.Struct, tag="leg_opened"):
    call: int
    ok: bool
    code: str = ""
    message: str = ""


class Freezing(msgspec.Struct, tag="freezing"):
    """`patience_s`: at least so long the stream may be silent; for what B must compute again first."""

    stream_id: str
    ticket: str
    patience_s: float = 0.0


class CloseLeg(msgspec.Struct, tag="close_leg"):
    stream_id: str
    ticket: str
    reason: str


class Resolve(msgspec.Struct, tag="resolve"):
    call: int
    stream_id: str
    ticket: str


class Resolved(msgspec.Struct, tag="resolved"):
    call: int
    outcome: Literal["switched", "discarded"]


class Producing(msgspec.Struct, tag="producing"):
    """B has finished its first step with the request. `tokens`: output tokens that were replayed at commit."""

    stream_id: str
    ticket: str
    tokens: int


class Switched(msgspec.Struct, tag="switched"):
    """Leg one is closed. `tokens`: output tokens that the client had at that moment (0 if not streamed)."""

    stream_id: str
    ticket: str
    tokens: int


class FirstToken(msgspec.Struct, tag="first_token"):
    """The client has its first new token from B. Times in milliseconds on the proxy's monotonic clock."""

    stream_id: str
    ticket: str
    gap_ms: float
    itl_ms: float


class Discarded(msgspec.Struct, tag="discarded"):
    stream_id: str
    ticket: str
    reason: str


class Ping(msgspec.Struct, tag="ping"):
    """Keeps a control connection alive; either side may send it at any time, nobody answers."""


ProxyMessage = (
    OpenLeg
    | LegOpened
    | Freezing
    | CloseLeg
    | Resolve
    | Resolved
    | Producing
    | Switched
    | FirstToken
    | Discarded
    | Ping
)

_handshake_decoder: msgspec.msgpack.Decoder[Hello | Auth | Welcome | Refused] = msgspec.msgpack.Decoder(
    Hello | Auth | Welcome | Refused
)
_proxy_decoder: msgspec.msgpack.Decoder[ProxyMessage] = msgspec.msgpack.Decoder(ProxyMessage)


def encode_frame(message: msgspec.Struct) -> bytes:
    """Returns the length-prefixed frame of `message`."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes | bytearray | memoryview) -> ProxyMessage:
    """Decodes the body of a control frame.

    Raises:
        ProtocolError: `bad_frame` when it is no message of `ProxyMessage`.
    """
    try:
        return _proxy_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bad_frame", str(error)) from error


def _mac(token: str, side: str, role: str, name: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    parts = (side.encode(), role.encode(), name.encode(), server_nonce, client_nonce)
    text = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(token.encode(), text, "sha256")


def answer_hello(hello: Hello, token: str, role: Role, name: str) -> Auth:
    """Builds the client's answer to the server's `Hello`.

    Raises:
        ProtocolError: `protocol_mismatch` when the server speaks another version.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise ProtocolError("protocol_mismatch", f"peer speaks protocol {hello.protocol}, we speak {PROTOCOL_VERSION}")
    nonce = secrets.token_bytes(32)
    return Auth(PROTOCOL_VERSION, role, name, nonce, _mac(token, "client", role, name, hello.nonce, nonce))


def check_welcome(welcome: object, hello: Hello, auth: Auth, token: str) -> Welcome:
    """Verifies that the server knows the token too.

    Raises:
        ProtocolError: with the server's code when it refused, `unauthenticated_server` when its proof is wrong.
    """
    if isinstance(welcome, Refused):
        raise ProtocolError(welcome.code, welcome.message)
    if not isinstance(welcome, Welcome) or not hmac.compare_digest(
        welcome.mac, _mac(token, "server", auth.role, auth.name, hello.nonce, auth.nonce)
    ):
        raise ProtocolError("unauthenticated_server", "the other side does not hold the join token")
    return welcome


def check_auth(auth: object, hello: Hello, token: str, server_name: str) -> tuple[Auth, Welcome]:
    """Server side: verifies a client's `Auth` and builds the `Welcome`.

    Raises:
        ProtocolError: `handshake_expected`, `protocol_mismatch` or `wrong_token`.
    """
    if not isinstance(auth, Auth):
        raise ProtocolError("handshake_expected", "the first frame must be an Auth")
    if auth.protocol != PROTOCOL_VERSION:
        raise ProtocolError("protocol_mismatch", f"peer speaks protocol {auth.protocol}, we speak {PROTOCOL_VERSION}")
    expected = _mac(token, "client", auth.role, auth.name, hello.nonce, auth.nonce)
    if len(auth.nonce) != 32 or not hmac.compare_digest(auth.mac, expected):
        raise ProtocolError("wrong_token", "the join token does not match")
    proof = _mac(token, "server", auth.role, auth.name, hello.nonce, auth.nonce)
    return auth, Welcome(server_name, proof)


# -- blocking sockets (engine core, workers) ---------------------------------------------------------------------------


class FrameSocket:
    """A blocking socket that carries frames and, between them, raw bytes. One reader and one writer at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def dial(cls, host: str, port: int, token: str, role: Role, name: str, timeout_s: float = 5.0) -> FrameSocket:
        """Connects and authenticates.

        Raises:
            OSError: unreachable. ProtocolError: refused, or not one of us.
        """
        sock = socket.create_connection((host, port), timeout=timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            frames = cls(sock)
            hello = frames._receive_handshake()
            if not isinstance(hello, Hello):
                raise ProtocolError("handshake_expected", "the server did not say Hello")
            auth = answer_hello(hello, token, role, name)
            frames.send(auth)
            check_welcome(frames._receive_handshake(), hello, auth, token)
        except BaseException:
            sock.close()
            raise
        return frames

    @classmethod
    def accept(cls, sock: socket.socket, token: str, server_name: str) -> tuple[FrameSocket, Auth]:
        """Server side of the handshake on a fresh connection; leaves the socket without a timeout.

        Raises:
            OSError, ProtocolError: the caller closes the socket and logs one line.
        """
        sock.settimeout(HANDSHAKE_DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = cls(sock)
        hello = Hello(PROTOCOL_VERSION, secrets.token_bytes(32))
        frames.send(hello)
        try:
            auth, welcome = check_auth(frames._receive_handshake(), hello, token, server_name)
        except ProtocolError as error:
            frames.send(Refused(error.code, error.message))
            raise
        frames.send(welcome)
        sock.settimeout(None)
        return frames, auth

    def send(self, message: msgspec.Struct) -> None:
        self.sock.sendall(encode_frame(message))

    def receive_body(self, limit: int = MAX_FRAME) -> bytearray:
        """Returns the body of the next frame.

        Raises:
            ConnectionError: closed. ProtocolError: `frame_too_large`.
        """
        (length,) = _LENGTH.unpack(self.receive_exactly(_LENGTH.size))
        if length > limit:
            raise ProtocolError("frame_too_large", f"{length} bytes announced, {limit} allowed")
        return self.receive_exactly(length)

    def receive_exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        self.receive_into(memoryview(buffer))
        return buffer

    def receive_into(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            count = self.sock.recv_into(view[got:])
            if count == 0:
                raise ConnectionError("connection closed by the other side")
            got += count

    def close(self) -> None:
        # shutdown() first: it wakes a thread that is blocked in recv() on this socket, close() alone does not.
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()

    def _receive_handshake(self) -> Any:
        try:
            return _handshake_decoder.decode(self.receive_body(MAX_UNAUTHENTICATED_FRAME))
        except msgspec.MsgspecError as error:
            raise ProtocolError("bad_frame", str(error)) from error


# -- asyncio streams (proxy) -------------------------------------------------------------------------------------------


async def read_frame_async(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> bytes:
    """Returns the body of the next frame.

    Raises:
        asyncio.IncompleteReadError: closed. ProtocolError: `frame_too_large`.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise ProtocolError("frame_too_large", f"{length} bytes announced, {limit} allowed")
    return await reader.readexactly(length)


async def dial_async(
    host: str, port: int, token: str, role: Role, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects and authenticates within the handshake deadline.

    Raises:
        OSError, TimeoutError, asyncio.IncompleteReadError: unreachable. ProtocolError: refused, or not one of us.
    """
    async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            hello = _decode_handshake(await read_frame_async(reader, MAX_UNAUTHENTICATED_FRAME))
            if not isinstance(hello, Hello):
                raise ProtocolError("handshake_expected", "the server did not say Hello")
            auth = answer_hello(hello, token, role, name)
            writer.write(encode_frame(auth))
            await writer.drain()
            answer = _decode_handshake(await read_frame_async(reader, MAX_UNAUTHENTICATED_FRAME))
            check_welcome(answer, hello, auth, token)
        except BaseException:
            writer.close()
            raise
    return reader, writer


def _decode_handshake(body: bytes) -> Hello | Auth | Welcome | Refused:
    try:
        return _handshake_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("bad_frame", str(error)) from error
