"""A request filter (`VLLM_HI_REQUEST_FILTER`) that both instances of the engine tests run with. It does what a file
says that a test writes; without the file everything may move."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RULE = "VLLM_HI_TEST_FILTER_RULE"


class Switchable:
    def should_migrate(self, seq_id: str, request_state: Mapping[str, Any]) -> Any:
        try:
            rule = json.loads(Path(os.environ[RULE]).read_text())
        except FileNotFoundError:
            return True
        if "fails_with" in rule:
            raise ValueError(rule["fails_with"])
        assert seq_id == request_state["request_id"]
        return request_state["stream_id"] not in rule["keeps"]


@contextmanager
def rule(**what: Any) -> Iterator[None]:
    """`keeps`: stream ids that stay. `fails_with`: the text of an exception."""
    path = Path(os.environ[RULE])
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").rename(path)
    try:
        yield
    finally:
        path.unlink()
