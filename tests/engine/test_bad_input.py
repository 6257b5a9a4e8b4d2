"""Garbage, wrong tokens and impossible wishes: a clear answer, and nothing changes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.answers import Answer, Request
from benchmarks.exactness import compare
from benchmarks.streams import mixed_requests
from tests.engine.conftest import RunningStack
from tests.engine.impostors import ByHand, Relay, data_port
from vllm_plugin.data_messages import Write, Written, decode_data
from vllm_plugin.messages import Commit, Grown, SessionOpened
from vllm_plugin.wire import PROTOCOL_VERSION, Auth, FrameSocket, Hello, Refused, answer_hello, encode_frame

SLOW = {"step_delay_s": 0.03}


def test_garbage_on_the_data_and_control_ports(stack: RunningStack) -> None:
    source = stack.active()
    ports = stack.status(source)["data_port"], stack.status(source)["control_port"]
    for port in ports:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x10\x00\x00\x00" + b"x" * 16):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(garbage)
                # A greeting and a refusal at most; then the other side closes, with unread bytes by a reset.
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4096):
                        pass
    answers = stack.run(mixed_requests(1, tokens=12, salt=61))
    assert not answers[0].error
    log = source.process.log.read_text(errors="replace")
    assert "closed a connection from 127.0.0.1" in log
    assert "Traceback" not in log.rpartition("closed a connection")[2]


def test_an_instance_answers_401_to_a_wrong_token(stack: RunningStack) -> None:
    source = stack.active()
    for method, path in (("GET", "/vllm_hi/status"), ("POST", "/vllm_hi/migration/abort")):
        answer = httpx.request(
            method, source.base_url + path, headers=stack.bearer("wrong"), json={}, timeout=10, trust_env=False
        )
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "wrong_token"


def test_an_unknown_model_is_404_in_the_shape_of_openai(stack: RunningStack) -> None:
    body = {"model": "no-such-model", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=10, trust_env=False)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "no-such-model" in answer.json()["error"]["message"]


@pytest.mark.parametrize("wish", ["unknown", "same", "not-a-standby"])
def test_impossible_migrations_are_refused(stack: RunningStack, wish: str) -> None:
    source, target = stack.active(), stack.standby()
    pairs = {
        "unknown": (source.id, "nobody", 404, "unknown_instance"),
        "same": (source.id, source.id, 400, "same_instance"),
        "not-a-standby": (target.id, source.id, 409, None),
    }
    one, other, status, code = pairs[wish]
    before = stack.get("/api/v1/migrations")["count"]
    answer = stack.post("/api/v1/migrations", {"source": one, "target": other})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert code is None or error["code"] == code
    assert error["message"].endswith(".")
    assert stack.get("/api/v1/migrations")["count"] == before


def test_a_request_that_cannot_move_says_why_and_ends_on_the_source(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    plain = mixed_requests(1, tokens=200, salt=62)
    scored = Request("scored", "/v1/completions", {**_scored(), "prompt_logprobs": 0})
    load = stack.load([*plain, scored])
    migration = stack.finished(stack.migrate(source, target))
    answers = load.result(120)

    assert all(not answer.error for answer in answers), [answer.error for answer in answers]
    assert migration.job["state"] == "done", migration.job
    codes = {row["code"] for row in migration.requests if row["outcome"] == "refused"}
    assert codes == {"prompt_logprobs"}, migration.requests
    assert migration.job["moved_requests"] == 1


def _scored() -> dict[str, object]:
    return {
        "prompt": "The ending of one story:",
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 9,
    }


# -- a peer that lies ------------------------------------------------------------------------------------------------


def _blocks_beyond_the_cache(message: Any) -> Any:
    if isinstance(message, Grown):
        for item in message.items:
            item.block_ids = [1_000_000 + place for place in range(len(item.block_ids))]
    return message


def _blocks_too_few(message: Any) -> Any:
    if isinstance(message, Grown):
        for item in message.items:
            item.block_ids = item.block_ids[:1]
    return message


def _more_computed_than_sent(message: Any) -> Any:
    if isinstance(message, Commit):
        for part in (part for item in message.items for part in item.parts):
            part.computed_tokens += 100
    return message


def _tokens_left_out(message: Any) -> Any:
    if isinstance(message, Commit):
        for part in (part for item in message.items for part in item.parts):
            part.output_tokens = part.output_tokens[:-1]
    return message


def _one_member_too_many(message: Any) -> Any:
    if isinstance(message, Commit):
        for item in message.items:
            item.parts.append(item.parts[0])
    return message


@pytest.mark.parametrize(
    ("lie", "codes"),
    [
        (_blocks_beyond_the_cache, {"target_lost"}),
        (_blocks_too_few, {"window_too_small", "target_lost"}),
        (_more_computed_than_sent, {"state_mismatch"}),
        (_tokens_left_out, {"state_mismatch"}),
        (_one_member_too_many, {"state_mismatch", "unknown_ticket"}),
    ],
)
def test_a_peer_that_lies_about_sizes(stack: RunningStack, lie: Callable[[Any], Any], codes: set[str]) -> None:
    source, target = stack.remember_roles()
    requests = mixed_requests(2, tokens=120, salt=64)
    references = stack.run(requests)
    free = stack.free_blocks(source), stack.free_blocks(target)
    relay = Relay(stack, target, lie)
    by_hand = ByHand(stack, f"lie-{lie.__name__}", source, target, control_port=relay.port)
    load = stack.load(requests)
    try:
        # The hold lets A say something in the commit that it has not said before.
        with stack.faults(source, hold_before_freeze_s=0.3, **SLOW), by_hand.session():
            assert len(by_hand.call("attach").json()["attached"]) == 2
            rows = by_hand.call("round", round=0).json().get("failed", [])
            rows += by_hand.call("handover").json().get("results", [])
    finally:
        relay.close()
    assert {row["code"] for row in rows if row.get("outcome", "stayed") == "stayed"} <= codes, rows
    assert len(rows) == 2 and all(row["message"].endswith(".") for row in rows), rows
    _assert_undisturbed(stack, references, load.result(120))
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)
    assert all(stack.status(one)["session"] is None for one in (source, target))


def _assert_undisturbed(stack: RunningStack, references: list[Answer], answers: list[Answer]) -> None:
    for reference, answer in zip(references, answers, strict=True):
        verdict = compare(reference, answer)
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"


@pytest.mark.parametrize("half", [True, False], ids=["dies-in-the-middle", "never-confirms"])
def test_a_target_whose_worker_takes_half_a_block_and_dies(stack: RunningStack, half: bool) -> None:
    source, target = stack.remember_roles()
    requests = mixed_requests(1, tokens=120, salt=65)
    references = stack.run(requests)
    free = stack.free_blocks(source), stack.free_blocks(target)

    def serve(frames: FrameSocket, message: Any) -> None:
        assert isinstance(message, Write)
        frames.receive_exactly(message.size // 2 if half else message.size)

    with data_port(stack.join_token, serve) as port:

        def elsewhere(message: Any) -> Any:
            if isinstance(message, SessionOpened):
                message.data_ports = [port for _ in message.data_ports]
            return message

        relay = Relay(stack, target, elsewhere)
        by_hand = ByHand(stack, f"half-{half}", source, target, control_port=relay.port)
        with stack.faults(source, **SLOW):
            load = stack.load(requests)
            with by_hand.session():
                assert len(by_hand.call("attach").json()["attached"]) == 1
                failed = by_hand.call("round", round=0).json()["failed"]
        relay.close()
    assert [row["code"] for row in failed] == ["target_lost"], failed
    _assert_undisturbed(stack, references, load.result(120))
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)


def test_a_source_whose_worker_sends_half_a_block_and_dies(stack: RunningStack) -> None:
    """B has allowed the session; what came is not used, and B goes on."""
    source, target = stack.remember_roles()
    free = stack.free_blocks(target)
    status = stack.status(target)
    seen: list[SessionOpened] = []

    def note(message: Any) -> Any:
        if isinstance(message, SessionOpened):
            seen.append(message)
        return message

    relay = Relay(stack, target, note)
    by_hand = ByHand(stack, "half-a-block", source, target, control_port=relay.port)
    size = status["kv"]["bytes_per_block"]
    with by_hand.session():
        for message, code in (
            (Write(seen[0].session, [7], size + 1), "size_mismatch"),
            (Write(seen[0].session, [0], size), "bad_block"),
            (Write("no such session", [7], size), "unknown_session"),
        ):
            frames = FrameSocket.dial("127.0.0.1", status["data_port"], stack.join_token, "worker", "liar")
            frames.send(message)
            answer = decode_data(frames.receive_body())
            assert isinstance(answer, Written) and (answer.ok, answer.code) == (False, code)
            frames.close()
        frames = FrameSocket.dial("127.0.0.1", status["data_port"], stack.join_token, "worker", "liar")
        frames.send(Write(seen[0].session, [status["kv"]["total_blocks"] - 1], size))
        frames.sock.sendall(b"\x00" * (size // 2))
        frames.close()
    relay.close()
    stack.until(lambda: stack.status(target)["session"] is None)
    assert stack.free_blocks(target) == free
    run = stack.migrate_under_load(mixed_requests(2, tokens=120, salt=66))
    assert run.migration.job["state"] == "done", run.migration.job
    assert all(verdict.exact for verdict in run.verdicts), run.verdicts


def test_another_protocol_version_is_refused_with_a_reason_on_both_ends(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    # A towards a target of another version.
    server = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        sock, _ = server.accept()
        sock.sendall(encode_frame(Hello(PROTOCOL_VERSION + 1, b"n" * 32)))
        sock.recv(4096)
        sock.close()

    greeting = threading.Thread(target=greet)
    greeting.start()
    by_hand = ByHand(stack, "other-version", source, target, control_port=server.getsockname()[1])
    answer = by_hand.call("start", peer=by_hand.peer, lease_s=10)
    greeting.join(30)
    server.close()
    assert answer.status_code in (409, 502), answer.text
    assert f"protocol {PROTOCOL_VERSION + 1}" in answer.json()["error"]["message"]
    # A source of another version towards B.
    with socket.create_connection(("127.0.0.1", stack.status(target)["control_port"]), timeout=10) as sock:
        frames = FrameSocket(sock)
        hello = msgspec.msgpack.decode(frames.receive_body(), type=Hello)
        auth = answer_hello(hello, stack.join_token, "peer", "somebody")
        frames.send(Auth(PROTOCOL_VERSION + 1, auth.role, auth.name, auth.nonce, auth.mac))
        refused = msgspec.msgpack.decode(frames.receive_body(), type=Refused)
    assert refused.code == "protocol_mismatch" and str(PROTOCOL_VERSION + 1) in refused.message
    assert all(stack.status(one)["session"] is None for one in (source, target))
    assert not stack.run(mixed_requests(1, tokens=12, salt=67))[0].error
