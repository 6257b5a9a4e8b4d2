"""Compares what clients got across a migration with what they get without one.

A stream counts as *cut* when the migration moved it and at least `MIN_SIDE` of its tokens were delivered before and
after. For requests that can be repeated (greedy, seeded) the comparison is with the same request run undisturbed. An
unseeded one has no twin: there every delivered token is scored again by the model, and its log-probability must be the
one that came with it. That only holds if the target continued from exactly the tokens that the client had.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import aiohttp

from benchmarks.streams import Answer

__all__ = ["MIN_SIDE", "Verdict", "compare", "percentile", "rescore", "verdicts"]

#: Tokens that a cut stream must have on each side of the cut to be counted.
MIN_SIDE = 10
LOGPROB_TOLERANCE = 1e-4
#: Scored in one pass instead of token by token: other matrix shapes, other rounding.
RESCORE_TOLERANCE = 2e-3


@dataclass
class Verdict:
    """What became of one request.

    Attributes:
        name: the request's name.
        differences: one sentence for each thing that is not as without a migration; empty = exact.
        lost, duplicated: tokens.
        cut_at: tokens at which it was cut, None when it was not moved.
        counted: it was really cut, with enough tokens on each side.
        gap_ms: longest time without a token around the cut as this client saw it; None where not streamed or not cut.
        itl_ms: this client's median time between tokens; None where not streamed.
    """

    name: str
    differences: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    cut_at: int | None = None
    counted: bool = False
    gap_ms: float | None = None
    itl_ms: float | None = None

    @property
    def exact(self) -> bool:
        return not self.differences


def compare(reference: Answer, answer: Answer) -> Verdict:
    """Compares two answers to the same repeatable request, or checks an unrepeatable one against itself."""
    verdict = Verdict(answer.request.name)
    found = verdict.differences
    if answer.error:
        found.append(f"no complete answer: {answer.error}")
    if answer.request.repeatable:
        if reference.error:
            found.append(f"no reference: {reference.error}")
        _count_tokens(verdict, reference.token_ids, answer.token_ids)
        if answer.token_ids != reference.token_ids:
            place = _first_difference(reference.token_ids, answer.token_ids)
            found.append(f"token ids differ from token {place} on ({verdict.lost} lost, {verdict.duplicated} extra)")
        if answer.text != reference.text:
            found.append(f"text differs from character {_first_difference(reference.text, answer.text)} on")
        if answer.finish_reason != reference.finish_reason:
            found.append(f"finish reason is {answer.finish_reason!r}, not {reference.finish_reason!r}")
        if _usage(answer) != _usage(reference):
            found.append(f"usage is {_usage(answer)}, not {_usage(reference)}")
        found += _compare_logprobs(reference.logprobs, answer.logprobs, LOGPROB_TOLERANCE)
        if answer.document is not None and reference.document is not None:
            found += _compare_documents(reference.document, answer.document)
    else:
        billed = answer.usage.get("completion_tokens", 0)
        verdict.lost = max(0, billed - len(answer.token_ids))
        verdict.duplicated = max(0, len(answer.token_ids) - billed)
        if billed != len(answer.token_ids):
            found.append(f"{len(answer.token_ids)} tokens delivered, {billed} in usage")
    return verdict


def verdicts(
    references: Sequence[Answer], answers: Sequence[Answer], moved: Sequence[Mapping[str, Any]]
) -> list[Verdict]:
    """Compares all answers and finds out which were really cut.

    Args:
        moved: rows of `/api/v1/migrations/<id>/requests`; those with outcome `moved` say at which token.
    """
    cuts = {row["stream_id"]: int(row["output_tokens"]) for row in moved if row["outcome"] == "moved"}
    result = []
    for reference, answer in zip(references, answers, strict=True):
        verdict = compare(reference, answer)
        cut = _cut_of(answer, cuts)
        if cut is not None:
            verdict.cut_at = cut
            verdict.counted = min(cut, len(answer.token_ids) - cut) >= MIN_SIDE
        _take_times(verdict, answer)
        result.append(verdict)
    return result


async def rescore(base_url: str, model: str, answer: Answer) -> list[str]:
    """Lets the model score the tokens of an answer that carried log-probabilities; returns what does not fit."""
    if answer.error or not answer.prompt_token_ids or not answer.logprobs:
        return [] if answer.error else ["cannot be scored again: prompt token ids or log-probabilities are missing"]
    tokens = answer.prompt_token_ids + answer.token_ids
    body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    async with aiohttp.ClientSession(base_url) as session, session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            return [f"cannot be scored again: HTTP {response.status}"]
        document = await response.json()
    choice = document["choices"][0]
    rows = choice["prompt_logprobs"][len(answer.prompt_token_ids) :]
    scored = [row[str(token)]["logprob"] for row, token in zip(rows, answer.token_ids, strict=True)]
    return _compare_logprobs(scored, answer.logprobs, RESCORE_TOLERANCE)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cut_of(answer: Answer, cuts: Mapping[str, int]) -> int | None:
    for stream_id, tokens in cuts.items():
        # The stream id is also part of the answer's id, which is made from the upstream request id.
        if stream_id and (stream_id == answer.stream_id or any(stream_id in name for name in answer.ids)):
            return tokens
    return None


def _take_times(verdict: Verdict, answer: Answer) -> None:
    if len(answer.arrivals) < 3:
        return
    spacing = []
    delivered = 0
    before: float | None = None
    for when, count in answer.arrivals:
        if before is not None:
            pause = (when - before) * 1000
            if verdict.cut_at is not None and _near_cut(delivered, count, verdict.cut_at):
                verdict.gap_ms = max(pause, verdict.gap_ms or 0.0)
            else:
                spacing.append(pause / count)
        delivered += count
        before = when
    if spacing:
        verdict.itl_ms = statistics.median(spacing)


def _near_cut(delivered: int, count: int, cut: int) -> bool:
    """Whether an event brings one of the tokens around the cut.

    The source's last token may reach the client through the target's replay, so the pause can be one token early.
    """
    return delivered <= cut + 1 and cut - 1 < delivered + count


def _count_tokens(verdict: Verdict, expected: list[int], got: list[int]) -> None:
    if expected == got:
        return
    for kind, a, b, c, d in SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if kind in ("delete", "replace"):
            verdict.lost += b - a
        if kind in ("insert", "replace"):
            verdict.duplicated += d - c


def _first_difference(expected: Sequence[Any], got: Sequence[Any]) -> int:
    for index, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return index
    return min(len(expected), len(got))


def _usage(answer: Answer) -> dict[str, Any]:
    return {name: answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _compare_logprobs(expected: Sequence[float], got: Sequence[float], tolerance: float) -> list[str]:
    if len(expected) != len(got):
        return [f"{len(got)} log-probabilities, not {len(expected)}"]
    worst = max((abs(one - other) for one, other in zip(expected, got, strict=True)), default=0.0)
    return [f"a log-probability differs by {worst:.1e}"] if worst > tolerance else []


def _compare_documents(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Non-streamed answers must be the same JSON; log-probabilities are compared with their tolerance elsewhere."""
    return [
        f"field {name!r} of the answer differs"
        for name in sorted(expected.keys() | got.keys())
        if _without_logprobs(expected.get(name)) != _without_logprobs(got.get(name))
    ]


def _without_logprobs(value: Any) -> Any:
    if isinstance(value, dict):
        # How much of a prompt was found in a cache says nothing about the answer.
        skipped = ("logprobs", "prompt_tokens_details")
        return {name: _without_logprobs(entry) for name, entry in value.items() if name not in skipped}
    if isinstance(value, list):
        return [_without_logprobs(entry) for entry in value]
    return value
