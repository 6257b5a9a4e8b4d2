"""The handshake: both sides prove that they hold the join token, and everything else is refused with a reason."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_plugin import wire
from vllm_plugin.wire import Auth, FrameSocket, Hello, Ping, Producing, ProtocolError, decode_frame, encode_frame


def _pair(serve: Callable[[socket.socket], Any]) -> tuple[int, list[Any]]:
    """Listens on a free port for one connection; the list gets what `serve` returned, or its exception."""
    listener = socket.create_server(("127.0.0.1", 0))
    outcome: list[Any] = []

    def run() -> None:
        sock, _ = listener.accept()
        try:
            outcome.append(serve(sock))
        except (OSError, ProtocolError) as error:
            outcome.append(error)
            sock.close()
        finally:
            listener.close()

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1], outcome


def _until_filled(outcome: list[Any]) -> Any:
    for _ in range(500):
        if outcome:
            return outcome[0]
        threading.Event().wait(0.01)
    raise AssertionError("the other side did not come to an end")


def test_both_sides_prove_the_token_and_frames_pass():
    port, outcome = _pair(lambda sock: FrameSocket.accept(sock, "secret", "server"))
    client = FrameSocket.dial("127.0.0.1", port, "secret", "proxy", "w1")
    frames, auth = _until_filled(outcome)
    assert (auth.role, auth.name) == ("proxy", "w1")
    client.send(Producing("s", "t", 7))
    assert decode_frame(frames.receive_body()) == Producing("s", "t", 7)
    client.close()
    with pytest.raises(ConnectionError):
        frames.receive_body()


def test_a_wrong_token_is_refused_on_both_ends():
    port, outcome = _pair(lambda sock: FrameSocket.accept(sock, "secret", "server"))
    with pytest.raises(ProtocolError) as refused:
        FrameSocket.dial("127.0.0.1", port, "guess", "peer", "x")
    assert refused.value.code == "wrong_token"
    assert _until_filled(outcome).code == "wrong_token"


def test_a_server_without_the_token_is_not_believed():
    port, _ = _pair(lambda sock: FrameSocket.accept(sock, "other", "server"))
    with pytest.raises(ProtocolError) as refused:
        FrameSocket.dial("127.0.0.1", port, "secret", "peer", "x")
    assert refused.value.code in ("wrong_token", "unauthenticated_server")


def test_a_server_that_only_claims_to_know_the_token_is_found_out():
    def pretend(sock: socket.socket) -> None:
        frames = FrameSocket(sock)
        frames.send(Hello(wire.PROTOCOL_VERSION, b"n" * 32))
        frames.receive_body()
        frames.send(wire.Welcome("server", b"m" * 32))

    port, _ = _pair(pretend)
    with pytest.raises(ProtocolError) as refused:
        FrameSocket.dial("127.0.0.1", port, "secret", "peer", "x")
    assert refused.value.code == "unauthenticated_server"


def test_another_protocol_version_is_refused_by_both():
    port, _ = _pair(lambda sock: FrameSocket(sock).send(Hello(99, b"n" * 32)))
    with pytest.raises(ProtocolError) as refused:
        FrameSocket.dial("127.0.0.1", port, "secret", "peer", "x")
    assert refused.value.code == "protocol_mismatch"
    hello = Hello(wire.PROTOCOL_VERSION, b"n" * 32)
    with pytest.raises(ProtocolError) as refused:
        wire.check_auth(Auth(99, "peer", "x", b"n" * 32, b""), hello, "secret", "server")
    assert refused.value.code == "protocol_mismatch"


def test_a_proof_for_another_role_or_name_is_worth_nothing():
    hello = Hello(wire.PROTOCOL_VERSION, b"n" * 32)
    auth = wire.answer_hello(hello, "secret", "proxy", "w1")
    wire.check_auth(auth, hello, "secret", "server")
    for role, name in (("worker", "w1"), ("proxy", "w2")):
        stolen = Auth(auth.protocol, role, name, auth.nonce, auth.mac)
        with pytest.raises(ProtocolError):
            wire.check_auth(stolen, hello, "secret", "server")


@pytest.mark.parametrize(
    ("garbage", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "frame_too_large"),
        (b"\x04\x00\x00\x00abcd", "bad_frame"),
        (encode_frame(Ping()), "bad_frame"),
        (encode_frame(Hello(1, b"")), "handshake_expected"),
    ],
)
def test_garbage_before_the_handshake(garbage: bytes, code: str):
    port, outcome = _pair(lambda sock: FrameSocket.accept(sock, "secret", "server"))
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(garbage)
        assert _until_filled(outcome).code == code


def test_an_unknown_message_is_a_protocol_error():
    for body in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        with pytest.raises(ProtocolError) as refused:
            decode_frame(body)
        assert refused.value.code == "bad_frame"
