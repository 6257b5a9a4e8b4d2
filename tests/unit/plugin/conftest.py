from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

TOKEN = "join-token"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment without our variables, put back afterwards whatever the code under test writes into it."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("VLLM_HI_") or name == "VLLM_PLUGINS"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_HI_TOKEN", TOKEN)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


class FakeEngineCore:
    """Stands for the way to the engine core; `answers` maps an operation to its answer or to what it raises."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {
            "status": {
                "ok": {
                    "role": "active",
                    "migration": {"supported": True, "missing_probes": []},
                    "factors": {"dtype": "float32"},
                    "adapters": ["fr"],
                    "kv": {"total_blocks": 10, "free_blocks": 9, "block_size": 128, "bytes_per_block": 4096},
                    "requests": {"running": 1, "waiting": 0, "parked": 0, "frozen": 0},
                    "data_port": 9000,
                    "control_port": 9001,
                    "session": None,
                }
            }
        }

    async def call_utility_async(self, method: str, operation: str, payload: dict[str, Any]) -> Any:
        self.calls.append((method, operation, payload))
        answer = self.answers.get(operation, {"ok": {"operation": operation}})
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def engine_core() -> FakeEngineCore:
    return FakeEngineCore()


@pytest.fixture
def engine_client(engine_core: FakeEngineCore) -> SimpleNamespace:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2048, dtype="torch.float32", quantization=None, enforce_eager=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=4096),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
    )
    return SimpleNamespace(engine_core=engine_core, vllm_config=config)
