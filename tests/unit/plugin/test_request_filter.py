"""The operator's own filter: how it is found, what it is asked, and what becomes of one that does not work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_plugin.request_filter import FILTER_FAILED, FILTERED, RequestFilter, RequestState

ROW = {"request_id": "r1", "prompt_tokens": 100, "output_tokens": 20}

SOURCE = """
class Short:
    def should_migrate(self, seq_id, request_state):
        assert seq_id == request_state["request_id"] == request_state.request_id
        return request_state.prompt_tokens + request_state["output_tokens"] < LIMIT

class Raises:
    def should_migrate(self, seq_id, request_state):
        raise KeyError("tenant")

class Truthy:
    def should_migrate(self, seq_id, request_state):
        return 1

class Curious:
    def should_migrate(self, seq_id, request_state):
        return request_state.temperature > 0

class Writes:
    def should_migrate(self, seq_id, request_state):
        request_state.prompt_tokens = 0
        return True

class Empty:
    pass

class Wants:
    def __init__(self, argument):
        pass
    def should_migrate(self, seq_id, request_state):
        return True

function = len
LIMIT = 1000
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_filters.py").write_text(SOURCE)
    (tmp_path / "broken_filters.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_filters", "broken_filters"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_filters"


def test_without_one_everything_may_go():
    chosen = RequestFilter(None)
    assert (chosen.name, chosen.problem, chosen.refusal("r1", ROW)) == (None, None, None)


def test_it_decides(module: str):
    chosen = RequestFilter(f"{module}.Short")
    assert chosen.problem is None
    assert chosen.refusal("r1", ROW) is None
    assert chosen.refusal("r1", ROW | {"prompt_tokens": 5000}) == (
        FILTERED,
        "The request filter my_filters.Short keeps the request here.",
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module.Filter", "No module named 'no_such_module'"),
        ("broken_filters.Filter", "No module named 'no_such_package'"),
        ("my_filters.Missing", "has no attribute 'Missing'"),
        ("my_filters.Empty", "Empty has no method should_migrate"),
        ("my_filters.function", "function is no class"),
        ("my_filters.Wants", "missing 1 required positional argument"),
    ],
)
def test_one_that_cannot_be_loaded_says_why_and_what_to_change(module: str, path: str, said: str):
    chosen = RequestFilter(path)
    assert chosen.problem is not None
    assert chosen.problem.startswith(f"VLLM_HI_REQUEST_FILTER={path} cannot be used: ")
    assert said in chosen.problem
    assert chosen.problem.endswith("or unset VLLM_HI_REQUEST_FILTER, and restart.")
    assert chosen.refusal("r1", ROW) == (FILTER_FAILED, chosen.problem)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", "should_migrate failed for r1: KeyError: 'tenant'. Correct the class"),
        ("Truthy", "should_migrate returned int for r1, not a bool. Correct the class"),
        ("Curious", "a request's state has no 'temperature'; it has request_id, prompt_tokens, output_tokens"),
        ("Writes", "a request's state cannot be changed"),
    ],
)
def test_one_that_fails_says_so(module: str, name: str, said: str):
    chosen = RequestFilter(f"{module}.{name}")
    assert chosen.problem is None
    refused = chosen.refusal("r1", ROW)
    assert refused is not None and refused[0] == FILTER_FAILED
    assert said in refused[1]


def test_a_state_reads_like_a_mapping():
    state = RequestState(ROW)
    assert dict(state) == ROW and len(state) == 3
    assert (state.get("nothing"), "request_id" in state) == (None, True)
    unhashable: Any = state
    with pytest.raises(TypeError):
        unhashable["request_id"] = "other"
