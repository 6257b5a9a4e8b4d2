"""Garbage, wrong tokens and impossible wishes: a clear answer, and nothing changes."""

from __future__ import annotations

import contextlib
import socket

import httpx
import pytest

from benchmarks.streams import Request, mixed_requests
from tests.engine.conftest import RunningStack


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
    several = Request("several", "/v1/completions", {**_several(), "n": 2})
    load = stack.load([*plain, several])
    migration = stack.finished(stack.migrate(source, target))
    answers = load.result(120)

    assert all(not answer.error for answer in answers), [answer.error for answer in answers]
    assert migration.job["state"] == "done", migration.job
    codes = {row["code"] for row in migration.requests if row["outcome"] == "refused"}
    assert codes == {"several_choices"}, migration.requests
    assert migration.job["moved_requests"] == 1


def _several() -> dict[str, object]:
    return {
        "prompt": "Two endings for one story:",
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 9,
    }
