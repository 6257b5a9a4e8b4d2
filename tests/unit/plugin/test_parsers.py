"""The table of streaming parsers: what it says of requests, and that it is still true of vLLM's own parsers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.parser_bench import KINDS, TOKENIZER, Bench, groupings
from vllm_plugin.parsers import INVARIANT, chunk_invariant, parser_names, tool_choice_kind


@pytest.fixture(autouse=True, scope="module")
def vllm_log() -> Iterator[None]:
    """The bench silences vLLM's log, which other tests read."""
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "none"),
        ({"tool_choice": "auto"}, "none"),
        ({"tools": [], "tool_choice": "required"}, "none"),
        ({"tools": TOOLS}, "auto"),
        ({"tools": TOOLS, "tool_choice": None}, "auto"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "auto"),
        ({"tools": TOOLS, "tool_choice": "none"}, "none"),
        ({"tools": TOOLS, "tool_choice": "required"}, "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "named"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "named"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto"}}, "auto"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "named"),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, "none"),
    ],
)
def test_the_tool_choice_of_a_body(body: dict[str, Any], kind: str):
    assert tool_choice_kind(body) == kind


def test_without_parsers_text_passes_through():
    assert all(chunk_invariant("", "", kind) for kind in KINDS)


def test_what_is_not_proved_is_refused():
    assert not chunk_invariant("nobody's", "", "none")
    assert not chunk_invariant("", "nobody's", "none")
    # Each may be proved alone: what counts is the pair.
    assert ("hermes", "nobody's") not in INVARIANT and not chunk_invariant("hermes", "nobody's", "none")
    assert not chunk_invariant("pythonic", "", "auto")


def config(model_type: str = "llama") -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)))


@pytest.mark.parametrize(
    ("factors", "model_type", "names"),
    [
        ({"tool_parser": "none", "reasoning_parser": "none"}, "llama", ("", "")),
        ({"tool_parser": "hermes", "reasoning_parser": "qwen3"}, "llama", ("hermes", "qwen3")),
        ({}, "llama", ("unknown", "unknown")),
        ({"tool_parser": "openai", "reasoning_parser": "none"}, "gpt_oss", ("unknown", "unknown")),
        ({"tool_parser": "none", "reasoning_parser": "none"}, "gpt_oss", ("", "")),
    ],
)
def test_the_parsers_of_an_instance(factors: dict[str, str], model_type: str, names: tuple[str, str]):
    assert parser_names(factors, config(model_type)) == names
    assert ("unknown", "unknown") not in INVARIANT


def test_groupings_cover_every_cut():
    sizes = list(groupings(6, random.Random(1)))
    assert all(sum(groups) == 6 for groups in sizes)
    assert [groups for groups in sizes if groups[1:] == [1] * (6 - groups[0])][:4] == [
        [2, 1, 1, 1, 1],
        [3, 1, 1, 1],
        [4, 1, 1],
        [5, 1],
    ]
    assert sizes[-1] == [6]


@pytest.fixture(scope="module")
def bench() -> Bench:
    pytest.importorskip("vllm")
    assert TOKENIZER.exists(), "the demo model is missing: python -m benchmarks.demo_models"
    return Bench()


@pytest.mark.parametrize(
    ("tool", "reasoning", "kind"),
    [
        ("pythonic", "", "required"),
    ],
)
def test_the_table_is_still_true(bench: Bench, tool: str, reasoning: str, kind: Any):
    assert chunk_invariant(tool, reasoning, kind)
    verdict = bench.verdict(tool, reasoning, kind, ["pieces"])
    assert verdict.movable, verdict.outcome


@pytest.mark.parametrize(
    ("tool", "reasoning", "kind", "mode"),
    [("pythonic", "", "auto", "pieces"), ("llama3_json", "", "auto", "tokens"), ("", "deepseek_r1", "none", "tokens")],
)
def test_a_parser_that_depends_on_grouping_is_found_out(bench: Bench, tool: str, reasoning: str, kind: Any, mode: str):
    assert not chunk_invariant(tool, reasoning, kind)
    verdict = bench.verdict(tool, reasoning, kind, [mode])
    assert verdict.counterexample
