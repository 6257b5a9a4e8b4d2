"""The quick start that users of the seed know: host, A, B with the flags of the size it shall have, migrate.

Verbatim but for the model, the ports, what a CPU needs (`--enforce-eager`, the size of the KV cache in bytes, cores),
and the two documented substitutes: `vllm-hi host`, and a token with every call.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.demo_models import tiny_model
from benchmarks.streams import Answer, mixed_requests, run_requests
from tests.engine.conftest import FIRST_PORT, FOLDER
from vllm_plugin.compatibility import FACTORS

NAME = "vllm_hi/tiny"
TOKEN = "quick-start-token"
BIN = Path(sys.executable).parent
ON_CPU = ["--enforce-eager", "--kv-cache-memory-bytes", str(128 * 1024**2), "--dtype", "float32"]
ON_CPU += ["--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "16384"]
SLOW = {"step_delay_s": 0.1}


def _target_tp() -> int:
    """2, as in the quick start, where requests can move between sizes at all."""
    fixed = [factor.name for factor in FACTORS if (factor.rule, factor.level) == ("equal", "error")]
    return 1 if "tensor_parallel_size" in fixed else 2


class QuickStart:
    """The three processes of the quick start, and the calls on the host."""

    def __init__(self, folder: Path, port: int, environment: dict[str, str]) -> None:
        self.folder = folder
        self.host, self.a, self.b = port + 2, port, port + 1
        self.environment = environment
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env={**os.environ, **self.environment, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def serve(self, name: str, port: int, data_port: int, tp: int, cores: str) -> None:
        self.start(
            name.lower(), "vllm", "serve", str(tiny_model()), "--port", str(port), "--served-model-name", NAME,
            "--tensor-parallel-size", str(tp), "--gpu-memory-utilization", "0.95", "--vllm-hi-type", name,
            "--vllm-hi-host", f"127.0.0.1:{self.host}", "--vllm-hi-data-port", str(data_port), *ON_CPU,
            VLLM_CPU_OMP_THREADS_BIND=cores,
        )  # fmt: skip

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        token = json.loads((self.folder / "state" / "credentials.json").read_text())["api_token"]
        method = "GET" if body is None else "POST"
        answer = httpx.request(
            method,
            f"http://127.0.0.1:{self.host}{path}",
            json=body,
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def until(self, condition: Callable[[], Any], limit_s: float = 240) -> None:
        ends_at = time.monotonic() + limit_s
        while True:
            with suppress(OSError, httpx.HTTPError, AssertionError, ValueError):
                if condition():
                    return
            dead = {name: one.returncode for name, one in self.processes.items() if one.poll() is not None}
            assert not dead, f"ended: {dead}; see {self.folder}"
            assert time.monotonic() < ends_at, f"it did not happen; see {self.folder}"
            time.sleep(0.2)

    def stop(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(params=[pytest.param("", id="random-ids", marks=pytest.mark.long), pytest.param("1", id="given-ids")])
def quick_start(request: pytest.FixtureRequest) -> Iterator[QuickStart]:
    """With and without `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`: a client's request id is then the engine's."""
    folder = FOLDER / f"quick-start-{request.param or 0}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {"VLLM_HI_TOKEN": TOKEN, "VLLM_HI_STATE_DIR": str(folder / "state"), "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_HI_NAP_US": "1000", "VLLM_HI_ENABLE_FAULTS": "1"}
    if request.param:
        environment["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = request.param
    running = QuickStart(folder, FIRST_PORT + 60, environment)
    try:
        yield running
    finally:
        running.stop()


def test_b_instantiates_requests_move_and_a_is_gone(quick_start: QuickStart) -> None:
    stack, tp = quick_start, _target_tp()
    cores = sorted(os.sched_getaffinity(0))
    stack.start("host", "vllm-hi", "host", "--port", str(stack.host))
    stack.until(lambda: (stack.folder / "state" / "credentials.json").exists())
    stack.serve("A", stack.a, stack.a + 1000, 1, str(cores[0]))
    stack.serve("B", stack.b, stack.b + 1000, tp, "|".join(str(core) for core in cores[-tp:]))
    stack.until(lambda: len(stack.call("/vllm_hi/instances")) == 2)
    rows = {row["instance_type"]: row for row in stack.call("/vllm_hi/instances")}
    assert (rows["A"]["status"], rows["B"]["status"]) == ("active", "standby")
    assert rows["B"]["topology"]["tensor_parallel_size"] == tp
    assert stack.call("/vllm_hi/status")["role"] == "scheduler"
    stack.until(lambda: [model["id"] for model in stack.call("/v1/models")["data"]] == [NAME])

    requests = mixed_requests(3, tokens=1200, salt=95)
    url = f"http://127.0.0.1:{stack.host}"
    references = asyncio.run(run_requests(url, NAME, requests))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    httpx.post(f"http://127.0.0.1:{stack.a}/vllm_hi/faults", json=SLOW, headers=headers).raise_for_status()
    answers: list[Answer] = []
    clients = threading.Thread(target=lambda: answers.extend(asyncio.run(run_requests(url, NAME, requests))))
    clients.start()
    stack.until(lambda: _running(stack, rows["A"]["vllm_hi_id"]) == 3)

    answer = stack.call(
        "/vllm_hi/migrate",
        {
            "src_vllm_hi_id": rows["A"]["vllm_hi_id"],
            "dst_vllm_hi_id": rows["B"]["vllm_hi_id"],
            "target_tp": tp,
            "target_pp": 1,
            "target_gpu_memory_utilization": 0.95,
            "migration_type": "destroy_source",
            "tn": 2,
        },
    )
    path = f"/vllm_hi/migration/{answer['migration_id']}/status"
    ends_at = time.monotonic() + 300
    while (progress := stack.call(path))["status"] == "in_progress":
        assert time.monotonic() < ends_at, progress
        time.sleep(0.5)
    assert (progress["status"], progress["error"]) == ("success", None), progress
    assert progress["new_active_instance"] == rows["B"]["vllm_hi_id"]
    assert progress["moved_requests"] == progress["total_requests"] == 3
    clients.join(300)
    assert [(one.error, one.token_ids) for one in answers] == [("", one.token_ids) for one in references]
    # A is gone, and B is what serves.
    assert stack.processes.pop("a").wait(60) == 0
    after = {row["vllm_hi_id"]: row for row in stack.call("/vllm_hi/instances")}
    assert after[rows["B"]["vllm_hi_id"]]["status"] == "active"
    assert rows["A"]["vllm_hi_id"] not in after
    assert after[rows["B"]["vllm_hi_id"]]["topology"]["tensor_parallel_size"] == tp


def _running(stack: QuickStart, vllm_hi_id: str) -> int:
    return int(stack.call(f"/api/v1/instances/{vllm_hi_id}")["requests"].get("running") or 0)
