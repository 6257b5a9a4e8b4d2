"""Factors are compared one by one; the same table decides in the pre-flight check and in the handshake."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_plugin.compatibility import (
    FACTORS,
    Check,
    adapters_text,
    compare,
    parse_adapters,
    refusal,
    warnings,
)
from vllm_plugin.topology import heads_text

BASE = {factor.name: "same" for factor in FACTORS} | {
    "max_model_len": "2048",
    "vllm_version": "0.32.0",
    "lora": adapters_text({"fr": "aa11", "de": "bb22"}),
}


def level_of(checks: list[Check], name: str) -> str:
    return next(check.level for check in checks if check.name == name)


def test_equal_factors_are_fine() -> None:
    checks = compare(BASE, BASE)
    assert [check.name for check in checks] == [factor.name for factor in FACTORS]
    assert {check.level for check in checks} == {"ok"}
    assert not any(check.remedy for check in checks)
    assert refusal(checks) is None
    assert warnings(checks) == []


def test_all_factors_of_the_protocol_are_in_the_table() -> None:
    names = {factor.name for factor in FACTORS}
    assert len(names) == len(FACTORS)
    assert names >= {
        "model", "weights", "dtype", "kv_cache_dtype", "block_size", "kv_groups", "runner", "rng", "cpu_isa",
        "tokenizer", "max_model_len", "vllm_version", "protocol_version", "lora",
    }  # fmt: skip
    assert all(factor.remedy.endswith(".") for factor in FACTORS)


@pytest.mark.parametrize("factor", FACTORS, ids=lambda factor: factor.name)
def test_each_factor_counts_when_it_differs(factor) -> None:
    other = {"max_model_len": "1024", "lora": "fr=aa11"}.get(factor.name, "other")
    checks = compare(BASE, BASE | {factor.name: other})
    assert level_of(checks, factor.name) == factor.level
    assert [check.name for check in checks if check.level != "ok"] == [factor.name]
    sentence = refusal(checks) if factor.level == "error" else warnings(checks)[0]
    assert sentence is not None
    # A name, both values, and what to do about it.
    assert all(part in sentence for part in (factor.name, str(BASE[factor.name]), other, factor.remedy))
    assert (refusal(checks) is None) == (factor.level == "warning")


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("dtype", None, "error"),
        # Whole blocks are packed by the instruction set: their bytes mean something else elsewhere.
        ("cpu_isa", "vec16", "error"),
        ("max_model_len", "2048", "ok"),
        ("max_model_len", 2048, "ok"),
        # Instances send their factors as text: 10000 is more than 2048.
        ("max_model_len", "10000", "ok"),
        ("max_model_len", "512", "error"),
        ("max_model_len", None, "error"),
        ("max_model_len", "many", "error"),
        ("lora", adapters_text({"fr": "aa11", "de": "bb22", "it": "cc33"}), "ok"),
        ("lora", adapters_text({"fr": "aa11"}), "error"),
        # The same name, another content.
        ("lora", adapters_text({"fr": "aa11", "de": "0000"}), "error"),
        ("lora", "none", "error"),
        ("lora", None, "error"),
    ],
)
def test_a_difference(name: str, value: object, level: str) -> None:
    assert level_of(compare(BASE, BASE | {name: value}), name) == level


SIZES = BASE | {
    "heads": heads_text(8, 4),
    "kv_groups": "12 FullAttentionSpec (0123)",
    "tensor_parallel_size": "2",
    "pipeline_parallel_size": "1",
}


@pytest.mark.parametrize(
    ("other", "level", "says"),
    [
        ({"tensor_parallel_size": "1"}, "ok", "2 shares become 1."),
        ({"tensor_parallel_size": "8"}, "ok", "2 shares become 4, each on 2 ranks."),
        # None of these can run, or would say so of itself.
        ({"tensor_parallel_size": "3"}, "error", "divides the model's attention heads"),
        ({"tensor_parallel_size": "many"}, "error", "divides the model's attention heads"),
        ({"tensor_parallel_size": None}, "error", "divides the model's attention heads"),
    ],
)
def test_another_tensor_parallel_size_is_a_matter_of_heads(other: dict[str, Any], level: str, says: str) -> None:
    for source, target in ((SIZES, SIZES | other), (SIZES | other, SIZES)):
        checks = compare(source, target)
        assert [check.name for check in checks if check.remedy] == ["tensor_parallel_size"]
        assert level_of(checks, "tensor_parallel_size") == level
    remedy = next(check.remedy for check in compare(SIZES, SIZES | other) if check.remedy)
    assert says in remedy


def test_both_sizes_may_differ_at_once() -> None:
    checks = compare(SIZES, SIZES | {"tensor_parallel_size": "1", "pipeline_parallel_size": "2"})
    assert refusal(checks) is None
    assert [check.name for check in checks if check.remedy] == ["tensor_parallel_size", "pipeline_parallel_size"]


def test_an_instance_that_does_not_tell_its_heads_is_not_remapped() -> None:
    silent = {name: value for name, value in SIZES.items() if name != "heads"}
    assert level_of(compare(silent, silent | {"tensor_parallel_size": "1"}), "tensor_parallel_size") == "error"


def test_a_source_without_adapters_may_move_to_a_target_with_some() -> None:
    assert level_of(compare(BASE | {"lora": "none"}, BASE), "lora") == "ok"
    assert level_of(compare({}, {"lora": "fr=aa11"}), "lora") == "ok"


def test_a_factor_of_a_newer_release_warns_and_is_named() -> None:
    checks = compare(BASE, BASE | {"kv_compression": "zstd"})
    assert checks[-1].name == "kv_compression"
    assert (checks[-1].level, checks[-1].source_value, checks[-1].target_value) == ("warning", "—", "zstd")
    assert "kv_compression" in checks[-1].remedy
    assert refusal(checks) is None
    newer = BASE | {"kv_compression": "zstd"}
    assert compare(newer, newer)[-1].level == "ok"


def test_an_error_is_told_even_after_a_warning() -> None:
    checks = compare(BASE, BASE | {"model": "other", "dtype": "bfloat16"})
    assert [check.name for check in checks if check.level != "ok"] == ["model", "dtype"]
    assert "dtype" in (refusal(checks) or "")


@pytest.mark.parametrize("adapters", [{}, {"a": "1"}, {"a, b": "1", "c=d": "2", "ü 100%": "3", "org/x": "4"}])
def test_adapters_as_text(adapters: dict[str, str]) -> None:
    assert parse_adapters(adapters_text(adapters)) == adapters
    assert parse_adapters(None) == parse_adapters("nonsense") == {}
