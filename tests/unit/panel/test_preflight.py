"""Factors are compared one by one, and the cost is predicted from numbers."""

from __future__ import annotations

import pytest

from migrations_app.preflight import Check, Preflight, compare_factors, estimate_cost

BASE = {"dtype": "float32", "vllm_version": "0.32.0", "max_model_len": 2048}


def level_of(checks: list[Check], name: str) -> str:
    return next(check.level for check in checks if check.name == name)


def test_equal_factors_are_fine() -> None:
    checks = compare_factors(BASE, BASE)
    assert [check.name for check in checks] == ["dtype", "max_model_len", "vllm_version"]
    assert {check.level for check in checks} == {"ok"}
    assert not any(check.remedy for check in checks)


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("dtype", "bfloat16", "error"),
        ("dtype", None, "error"),
        ("vllm_version", "0.33.0", "warning"),
        ("max_model_len", 1024, "error"),
        ("max_model_len", 4096, "ok"),
        # Instances send their factors as text: 10000 is more than 2048.
        ("max_model_len", "10000", "ok"),
        ("max_model_len", "512", "error"),
        ("cpu_isa", "avx2", "warning"),
        ("max_model_len", None, "error"),
        ("kv_heads", 8, "error"),
    ],
)
def test_a_difference(name: str, value: object, level: str) -> None:
    checks = compare_factors(BASE, BASE | {name: value})
    assert level_of(checks, name) == level
    assert Preflight(checks).level == level
    assert Preflight(checks).ok == (level != "error")
    assert all(check.remedy.endswith(".") for check in checks if check.level != "ok")


def test_the_estimate_counts_what_can_move() -> None:
    rows = [
        {"migratable": True, "kv_blocks": 10},
        {"migratable": True, "kv_blocks": 5},
        {"migratable": False, "kv_blocks": 1000},
    ]
    estimate = estimate_cost(rows, {"bytes_per_block": 1000})
    assert (estimate.requests, estimate.blocks, estimate.bytes) == (2, 15, 15000)
    assert estimate_cost([], {"bytes_per_block": 1000}).gap_ms is None
