"""The `curl` sequence that users of the protocol know, with a token header, against the real product."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from benchmarks.streams import mixed_requests
from tests.engine.conftest import RunningStack


def _curl(
    stack: RunningStack, path: str, body: dict[str, Any] | None = None, token: str | None = None
) -> tuple[int, Any]:
    command = ["curl", "-sS", "-w", "\n%{http_code}", stack.url + path]
    command += ["-H", f"Authorization: Bearer {stack.api_token if token is None else token}"]
    if body is not None:
        command += ["-X", "POST", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    text, _, status = output.rpartition("\n")
    return int(status), json.loads(text)


def test_the_curl_sequence_from_status_to_the_new_active_instance(stack: RunningStack) -> None:
    status, document = _curl(stack, "/vllm_hi/status")
    assert (status, document["role"], document["active"]) == (200, "scheduler", True)
    assert document["instances"] >= 2

    _, instances = _curl(stack, "/vllm_hi/instances")
    assert isinstance(instances, list)
    known = {row["vllm_hi_id"]: row for row in instances}
    source, target = stack.active(), stack.standby()
    assert (known[source.id]["instance_type"], known[source.id]["status"]) == ("A", "active")
    assert (known[target.id]["instance_type"], known[target.id]["status"]) == ("B", "standby")
    assert known[source.id]["topology"]["tensor_parallel_size"] == 1
    _, models = _curl(stack, "/v1/models")
    assert [model["id"] for model in models["data"]] == [stack.model]

    load = stack.load(mixed_requests(4, tokens=200, salt=51))
    status, answer = _curl(
        stack,
        "/vllm_hi/migrate",
        {
            "src_vllm_hi_id": source.id,
            "dst_vllm_hi_id": target.id,
            "target_tp": 1,
            "target_pp": 1,
            "target_gpu_memory_utilization": known[target.id]["topology"]["gpu_memory_utilization"],
            "migration_type": "preserve_source",
            "tn": 2,
        },
    )
    assert status in (200, 202), answer
    migration_id = answer["migration_id"]
    ends_at = time.monotonic() + 120
    while (progress := _curl(stack, f"/vllm_hi/migration/{migration_id}/status")[1])["status"] == "in_progress":
        assert time.monotonic() < ends_at, progress
        time.sleep(0.5)

    assert progress["status"] == "success", progress
    assert progress["new_active_instance"] == target.id
    assert progress["moved_requests"] == progress["total_requests"] == 4
    history = progress["step_history"]
    rounds = [entry for entry in history if entry["step"] in ("full_transfer_done", "incremental_transfer_done")]
    assert [entry["round_idx"] for entry in rounds] == list(range(len(rounds))) and len(rounds) >= 2
    assert all("data_size_bytes" in entry and "block_count" in entry for entry in rounds)
    assert rounds[0]["block_count"] > 0 and rounds[0]["data_size_bytes"] > 0
    names = [entry["step"] for entry in history]
    for before, after in (("validate", "full_transfer"), ("full_transfer", "pause_a"), ("pause_a", "switch_service")):
        assert names.index(before) < names.index(after), names
    assert names[-1] == "done"
    assert all(not answer.error for answer in load.result(120))


def test_a_wrong_token_and_an_unknown_migration(stack: RunningStack) -> None:
    for path, body in (("/vllm_hi/status", None), ("/vllm_hi/instances", None), ("/vllm_hi/migrate", {})):
        assert _curl(stack, path, body, token="wrong")[0] == 401, path
    registration = {"ip": "127.0.0.1", "port": 1, "instance_type": "A", "served_model_name": "m", "data_port": 1}
    assert _curl(stack, "/vllm_hi/register", registration, token="wrong")[0] == 401
    unknown = "/vllm_hi/migration/00000000-0000-0000-0000-000000000000/status"
    assert _curl(stack, unknown) == (404, {"error": "migration_not_found"})
