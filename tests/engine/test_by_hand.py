"""A whole migration driven with `curl` and the join token, as docs/protocol.md writes it down."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from benchmarks.exactness import compare
from benchmarks.streams import sized_request
from controlplane.serving import Instance
from tests.engine.conftest import RunningStack

JOB = {"job": "by-hand", "attempt": 1}


def _curl(stack: RunningStack, instance: Instance, call: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    url = f"{instance.base_url}/vllm_hi/migration/{call}"
    command = ["curl", "-sS", "-w", "\n%{http_code}", "-X", "POST", url]
    command += ["-H", f"Authorization: Bearer {stack.join_token}", "-d", json.dumps({**JOB, **fields})]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    text, _, status = output.rpartition("\n")
    answer: dict[str, Any] = json.loads(text)
    return int(status), answer


def _done(stack: RunningStack, instance: Instance, call: str, **fields: Any) -> dict[str, Any]:
    status, answer = _curl(stack, instance, call, **fields)
    assert status == 200, (call, answer)
    return answer


def test_a_stream_moves_by_hand_and_its_client_does_not_notice(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    free = [stack.free_blocks(one) for one in (source, target)]
    requests = [
        sized_request("hand", 300, 400, 9400, {"temperature": 0}),
        sized_request("hand-seeded", 300, 400, 9401, {"temperature": 1.0, "seed": 11, "logprobs": 1}),
    ]
    references = stack.run(requests)

    status, answer = _curl(stack, source, "collect", mode="full")
    assert (status, answer["error"]["code"]) == (409, "no_session")

    with stack.faults(source, step_delay_s=0.03), stack.faults(target, step_delay_s=0.03):
        load = stack.load(requests)
        peer = _done(stack, target, "receive")["peer"]
        assert peer["vllm_hi_id"] == target.id
        first = _done(stack, source, "collect", mode="full", peer=peer)
        assert (first["mode"], first["round_idx"], len(first["requests"]), first["refused"]) == ("full", 0, 2, [])
        assert first["block_count"] > 0 and first["data_size_bytes"] > 0
        second = _done(stack, source, "collect", mode="incremental")
        assert second["round_idx"] == 1 and second["requests"] == first["requests"]
        held = _done(stack, target, "receive")
        assert len(held["parked"]) == 2 and held["blocks"] > 0 and held["moved"] == 0

        # A pause ends by itself at its deadline, and by `resume`.
        _done(stack, source, "pause", deadline_s=0.3)
        stack.until(lambda: stack.status(source)["paused_by"] is None)
        assert _done(stack, source, "resume") == {"resumed": False}
        paused = _done(stack, source, "pause", deadline_s=30)
        assert paused == {"paused": 2, "expires_in_s": 30.0}
        before = _settled_counts(load.live)
        time.sleep(0.5)
        assert [len(answer.token_ids) for answer in load.live] == before
        status, refused = _curl(stack, source, "resume", job="another")
        assert (status, refused["error"]["code"]) == (409, "paused_by_another")
        _done(stack, source, "collect", mode="incremental")

        # Handed over while they stand still, they go on over there.
        results = _done(stack, source, "handover")["results"]
        assert [row["outcome"] for row in results] == ["moved", "moved"], results
        assert _done(stack, target, "receive")["moved"] == 2
        assert _done(stack, source, "resume") == {"resumed": True}
        assert _done(stack, source, "finish")["moved"] == 2
        assert _done(stack, target, "activate") == {"role": "active"}
        stack.until(lambda: not stack.streams_on(source))
        assert _done(stack, source, "convert_to_b") == {"role": "standby"}
        assert stack.streams_on(target) == {answer.stream_id for answer in load.live}

        # The panel hears of it and routes new requests accordingly.
        stack.until(lambda: [row["status"] for row in _rows(stack, source, target)] == ["standby", "active"])
        assert [row["routed"] for row in _rows(stack, source, target)] == [False, True]
    for reference, answer in zip(references, load.result(120), strict=True):
        verdict = compare(reference, answer)
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
    stack.until(lambda: [stack.free_blocks(one) for one in (source, target)] == free)


def _settled_counts(live: list[Any]) -> list[int]:
    """What the clients have once nothing is on its way to them any more."""
    while True:
        counts = [len(answer.token_ids) for answer in live]
        time.sleep(0.2)
        if counts == [len(answer.token_ids) for answer in live]:
            return counts


def _rows(stack: RunningStack, *instances: Instance) -> list[dict[str, Any]]:
    rows = {row["vllm_hi_id"]: row for row in stack.rows()}
    return [rows[one.id] for one in instances]
