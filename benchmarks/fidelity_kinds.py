"""The rows of the fidelity matrix, in the order of the document."""

from __future__ import annotations

from benchmarks.kinds import Kind
from benchmarks.kinds_answers import ANSWERS, REASONING
from benchmarks.kinds_sampling import SAMPLING
from benchmarks.kinds_states import ADAPTERS, REFUSED, STATES

__all__ = ["KINDS", "Kind"]

KINDS: list[Kind] = [*SAMPLING, *ANSWERS, *REASONING, *STATES, *ADAPTERS, *REFUSED]
