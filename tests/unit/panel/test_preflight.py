"""The worst difference decides, and the cost is predicted from numbers. The factors themselves are tested with their
table, in tests/unit/plugin/test_compatibility.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from migrations_app.prediction import MOST_ROUNDS, estimate_cost
from migrations_app.preflight import Preflight
from vllm_plugin.compatibility import compare

BASE = {"dtype": "float32", "vllm_version": "0.32.0", "max_model_len": 2048}


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({}, "ok"),
        ({"vllm_version": "0.33.0"}, "warning"),
        ({"dtype": "bfloat16"}, "error"),
        ({"vllm_version": "0.33.0", "dtype": "bfloat16"}, "error"),
    ],
)
def test_the_worst_difference_decides(changed: dict[str, object], level: str) -> None:
    preflight = Preflight(compare(BASE, BASE | changed))
    assert preflight.level == preflight.as_dict()["level"] == level
    assert preflight.ok == (level != "error")
    problem = preflight.first_error()
    assert (problem is not None) == (level == "error")
    if problem is not None:
        assert (problem.name, problem.source_value, problem.target_value) == ("dtype", "float32", "bfloat16")


def test_the_panel_needs_neither_vllm_nor_torch_for_it() -> None:
    # Both are installed where these tests run: that nothing imports them must be seen in a process of its own.
    code = "import sys, vllm_plugin.compatibility; sys.exit(bool({'vllm', 'torch', 'django'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_estimate_counts_what_can_move() -> None:
    rows = [
        {"migratable": True, "kv_blocks": 10},
        {"migratable": True, "kv_blocks": 5},
        {"migratable": False, "kv_blocks": 1000},
    ]
    estimate = estimate_cost(rows, {"bytes_per_block": 1000})
    assert (estimate.requests, estimate.blocks, estimate.bytes) == (2, 15, 15000)
    assert estimate_cost([], {"bytes_per_block": 1000}).gap_ms is None


def running(tokens_per_s: float, blocks: int = 10) -> dict[str, object]:
    return {
        "migratable": True,
        "kv_blocks": blocks,
        "status": "RUNNING",
        "output_tokens": tokens_per_s * 10,
        "age_s": 10,
    }


@pytest.mark.parametrize(
    ("tokens_per_s", "bytes_per_s", "rounds", "converges"),
    [
        (0, 1e6, 2, True),
        # 16,000 bytes/s are written, and a tenth of what was sent is left after each round: 10 blocks, 1, and done.
        (16, 160_000, 2, True),
        (16, 32_000, 5, True),
        (16, 16_000, MOST_ROUNDS, False),
        (16, 1_000, MOST_ROUNDS, False),
    ],
)
def test_the_rounds_are_a_geometric_series(
    tokens_per_s: float, bytes_per_s: float, rounds: int, converges: bool
) -> None:
    kv = {"bytes_per_block": 16_000, "block_size": 16}
    estimate = estimate_cost([running(tokens_per_s)], kv, {"bytes_per_s": bytes_per_s})
    assert (estimate.rounds, estimate.converges) == (rounds, converges)
    assert estimate.dirty_bytes_per_s == 1000 * tokens_per_s
    assert estimate.bytes >= 160_000
    assert estimate.gap_ms == pytest.approx(1000 * 16_000 / bytes_per_s)


def test_a_request_that_waits_writes_nothing() -> None:
    waiting = running(50) | {"status": "WAITING"}
    assert estimate_cost([waiting], {"bytes_per_block": 16_000, "block_size": 16}).dirty_bytes_per_s == 0
