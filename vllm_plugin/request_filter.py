"""The operator's own choice of requests: `VLLM_HI_REQUEST_FILTER=module.Class`.

The class is made once, without arguments, in the engine core. Its `should_migrate(seq_id, request_state)` is asked
between two steps whenever requests are listed or attached, so it must be quick: `seq_id` is the request's id, and
`request_state` has the fields of `/vllm_hi/requests`, read only, as items and as attributes. It returns True for a
request that may move, False for one that stays. Anything else, and any exception, stops a migration before it begins.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["FILTERED", "FILTER_FAILED", "RequestFilter", "RequestState"]

logger = logging.getLogger("vllm.vllm_hi.request_filter")

FILTERED = "filtered"
FILTER_FAILED = "request_filter_failed"
VARIABLE = "VLLM_HI_REQUEST_FILTER"


class RequestState(Mapping[str, Any]):
    """One request as it is now: `request_id`, `stream_id`, `proxy`, `model`, `status`, `choices`, `prompt_tokens`,
    `output_tokens`, `computed_tokens`, `max_tokens`, `kv_blocks`, `age_s`."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"a request's state has no {name!r}; it has {', '.join(self._fields)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a request's state cannot be changed")


class RequestFilter:
    """`name`: as configured, None without a filter. `problem`: why it cannot be used, one sentence with the remedy."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.problem: str | None = None
        self._should_migrate: Callable[[str, RequestState], object] | None = None
        if name is None:
            return
        try:
            self._should_migrate = _load(name)
        except Exception as error:
            # Foreign code: whatever it raises is told, and the instance serves as without a filter.
            self.problem = f"{VARIABLE}={name} cannot be used: {_said(error)}. {_REMEDY}"
            logger.exception("the request filter %s cannot be used", name)

    def refusal(self, request_id: str, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """(code, sentence) when the request must stay here: `filtered`, or `request_filter_failed`."""
        if self.problem is not None:
            return FILTER_FAILED, self.problem
        if self._should_migrate is None:
            return None
        try:
            may_go = self._should_migrate(request_id, RequestState(row))
        except Exception as error:
            logger.exception("the request filter %s failed", self.name)
            return FILTER_FAILED, f"{self.name}.should_migrate failed for {request_id}: {_said(error)}. {_REMEDY}"
        if not isinstance(may_go, bool):
            what = type(may_go).__name__
            return FILTER_FAILED, f"{self.name}.should_migrate returned {what} for {request_id}, not a bool. {_REMEDY}"
        return None if may_go else (FILTERED, f"The request filter {self.name} keeps the request here.")


_REMEDY = f"Correct the class (should_migrate(seq_id, request_state) -> bool), or unset {VARIABLE}, and restart."


def _load(path: str) -> Callable[[str, RequestState], object]:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no class")
    method = getattr(found(), "should_migrate", None)
    if not callable(method):
        raise TypeError(f"{name} has no method should_migrate")
    called: Callable[[str, RequestState], object] = method
    return called


def _said(error: Exception) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
