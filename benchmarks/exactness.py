"""Compares what clients got across a migration with what they get without one.

A stream counts as *cut* when a migration moved it and at least `MIN_SIDE` of its tokens were delivered before and
after. For requests that can be repeated (greedy, seeded) the comparison is with the same request run undisturbed,
choice by choice and channel by channel; where a route carries no token ids, text and usage have to do. An unseeded
request has no twin: there every delivered token is scored again by the model, and its log-probability must be the one
that came with it. That only holds if the target continued from exactly the tokens that the client had.

Breaches of protocol (`Answer.faults`) are differences unless the undisturbed answer has the same ones: what vLLM does
itself is not a migration's doing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import aiohttp

from benchmarks.answers import Answer, Choice

__all__ = ["MIN_SIDE", "Split", "Verdict", "compare", "percentile", "rescore", "verdicts", "weigh"]

#: Tokens that a cut stream must have on each side of the cut to be counted.
MIN_SIDE = 10
LOGPROB_TOLERANCE = 1e-4
#: Scored in one pass instead of token by token: other matrix shapes, other rounding.
RESCORE_TOLERANCE = 2e-3
#: Two tokens whose log-probabilities are as close as this can change places with the rounding of a batch.
TIE = 1e-3
#: Of a JSON answer: made up anew for each request, compared elsewhere with a tolerance, or about caches.
_VOLATILE = frozenset(
    (
        *("id", "call_id", "item_id", "signature", "created", "created_at", "completed_at", "logprobs"),
        *("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens"),
    )
)


@dataclass
class Split:
    """Where the tokens of one choice part from those of the undisturbed answer.

    Attributes:
        choice, position: index of the choice, and of the first token that differs in it.
        expected, got: token ids, None where one side has ended.
        gap: difference of the two tokens' log-probabilities in the model itself, None while it is not known.
    """

    choice: int
    position: int
    expected: int | None
    got: int | None
    gap: float | None = None

    @property
    def tied(self) -> bool:
        return self.gap is not None and self.gap < TIE

    def __str__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.1e}"
        return f"choice {self.choice} token {self.position}: {self.expected} became {self.got}, logit gap {gap}"


@dataclass
class Verdict:
    """What became of one request.

    Attributes:
        name: the request's name.
        differences: one sentence for each thing that is not as without a migration; empty = exact.
        splits: where tokens differ, one for each choice.
        lost, duplicated: tokens.
        cuts: tokens at which it was cut, all choices together, one for each move.
        counted: it was really cut, each time with enough tokens on each side.
        gap_ms: longest time without a token around the cut as this client saw it; None where not streamed or not cut.
        itl_ms: this client's median time between tokens; None where not streamed.
    """

    name: str
    differences: list[str] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    cuts: list[int] = field(default_factory=list)
    counted: bool = False
    gap_ms: float | None = None
    itl_ms: float | None = None

    @property
    def exact(self) -> bool:
        return not self.differences

    @property
    def cut_at(self) -> int | None:
        """Tokens at which it was cut for the first time, None when it was not moved."""
        return self.cuts[0] if self.cuts else None


def compare(reference: Answer, answer: Answer) -> Verdict:
    """Compares two answers to the same repeatable request, or checks an unrepeatable one against itself."""
    verdict = Verdict(answer.request.name)
    found = verdict.differences
    if answer.error:
        found.append(f"no complete answer: {answer.error}")
    found += [fault for fault in answer.faults if fault not in reference.faults]
    if not answer.request.repeatable:
        _check_billing(verdict, answer)
        return verdict
    if reference.error:
        found.append(f"no reference: {reference.error}")
    if answer.choices.keys() != reference.choices.keys():
        found.append(f"choices are {sorted(answer.choices)}, not {sorted(reference.choices)}")
    for index in sorted(answer.choices.keys() | reference.choices.keys()):
        prefix = f"choice {index}: " if len(reference.choices) > 1 else ""
        differences = _compare_choice(verdict, index, reference.choice(index), answer.choice(index))
        found += [prefix + difference for difference in differences]
    if answer.billed != reference.billed:
        found.append(f"usage is {answer.billed}, not {reference.billed}")
    if answer.document is not None and reference.document is not None:
        found += _compare_documents(reference.document, answer.document)
    return verdict


def _check_billing(verdict: Verdict, answer: Answer) -> None:
    billed, delivered = answer.billed["completion_tokens"] or 0, len(answer.token_ids)
    verdict.lost = max(0, billed - delivered)
    verdict.duplicated = max(0, delivered - billed)
    if billed != delivered:
        verdict.differences.append(f"{delivered} tokens delivered, {billed} in usage")


def _compare_choice(verdict: Verdict, index: int, expected: Choice, got: Choice) -> list[str]:
    found = []
    if got.token_ids != expected.token_ids:
        place = _first_difference(expected.token_ids, got.token_ids)
        verdict.splits.append(
            Split(index, place, _at(expected.token_ids, place), _at(got.token_ids, place)),
        )
        lost, extra = _count_tokens(expected.token_ids, got.token_ids)
        verdict.lost += lost
        verdict.duplicated += extra
        found.append(f"token ids differ from token {place} on ({lost} lost, {extra} extra)")
    for name, one, other in (("text", expected.text, got.text), ("reasoning", expected.reasoning, got.reasoning)):
        if one != other:
            place = _first_difference(one, other)
            near = f"{other[place : place + 12]!r} instead of {one[place : place + 12]!r}"
            found.append(f"{name} differs from character {place} on: {near}")
    tools = [[(number, call.name, call.arguments) for number, call in sorted(c.tools.items())] for c in (expected, got)]
    if tools[0] != tools[1]:
        found.append(f"tool calls are {tools[1]}, not {tools[0]}")
    if got.finish_reason != expected.finish_reason:
        found.append(f"finish reason is {got.finish_reason!r}, not {expected.finish_reason!r}")
    if got.stop_reason != expected.stop_reason:
        found.append(f"stop reason is {got.stop_reason!r}, not {expected.stop_reason!r}")
    # After another token everything else has another log-probability too.
    if got.token_ids == expected.token_ids:
        found += _compare_logprobs(expected.logprobs, got.logprobs, LOGPROB_TOLERANCE)
        found += _compare_alternatives(expected.alternatives, got.alternatives)
        if got.offsets != expected.offsets:
            found.append("text offsets of the log-probabilities differ")
    return found


def verdicts(
    references: Sequence[Answer], answers: Sequence[Answer], moved: Sequence[Mapping[str, Any]]
) -> list[Verdict]:
    """Compares all answers and finds out which were really cut.

    Args:
        moved: rows of `/api/v1/migrations/<id>/requests`; those with outcome `moved` say at which token.
    """
    result = []
    for reference, answer in zip(references, answers, strict=True):
        verdict = compare(reference, answer)
        verdict.cuts = _cuts_of(answer, moved)
        sides = [min(cut, answer.tokens - cut) for cut in verdict.cuts]
        verdict.counted = bool(sides) and min(sides) >= MIN_SIDE
        _take_times(verdict, answer)
        result.append(verdict)
    return result


async def rescore(base_url: str, model: str, answer: Answer) -> list[str]:
    """Lets the model score the tokens of an answer that carried log-probabilities; returns what does not fit."""
    if answer.error:
        return []
    found = []
    for choice in answer.ordered:
        if not choice.prompt_token_ids or not choice.logprobs:
            return ["cannot be scored again: prompt token ids or log-probabilities are missing"]
        try:
            scored = await _score(base_url, model, choice.prompt_token_ids, choice.token_ids)
        except RuntimeError as error:
            return [str(error)]
        found += _compare_logprobs(scored, choice.logprobs, RESCORE_TOLERANCE)
    return found


async def weigh(base_url: str, model: str, reference: Answer, split: Split) -> None:
    """Asks the model how far apart the expected token and the one that came are, and writes it into `split`."""
    choice = reference.choice(split.choice)
    prompt = choice.prompt_token_ids or reference.prompt_token_ids
    if not prompt or split.expected is None or split.got is None:
        return
    before = prompt + choice.token_ids[: split.position]
    try:
        (expected,) = await _score(base_url, model, before, [split.expected])
        (got,) = await _score(base_url, model, before, [split.got])
    except RuntimeError:
        return
    split.gap = abs(expected - got)


async def _score(base_url: str, model: str, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probabilities of `tokens` after `prompt`.

    Raises:
        RuntimeError: the instance refuses.
    """
    body = {"model": model, "prompt": prompt + tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    async with aiohttp.ClientSession(base_url) as session, session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"cannot be scored again: HTTP {response.status}")
        document = await response.json()
    rows = document["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [row[str(token)]["logprob"] for row, token in zip(rows, tokens, strict=True)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cuts_of(answer: Answer, moved: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where an answer was cut, one number for each migration: its requests' tokens together."""
    cuts: dict[Any, int] = {}
    for row in moved:
        stream_id = row["stream_id"]
        # The stream id is also part of the answer's id, which is made from the upstream request id.
        if row["outcome"] != "moved" or not stream_id:
            continue
        if stream_id == answer.stream_id or any(stream_id in name for name in answer.ids):
            job = row.get("job", "")
            cuts[job] = cuts.get(job, 0) + int(row["output_tokens"])
    return list(cuts.values())


def _take_times(verdict: Verdict, answer: Answer) -> None:
    if len(answer.arrivals) < 3:
        return
    spacing = []
    delivered = 0
    before: float | None = None
    for when, count in answer.arrivals:
        if before is not None:
            pause = (when - before) * 1000
            if any(_near_cut(delivered, count, cut) for cut in verdict.cuts):
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


def _count_tokens(expected: list[int], got: list[int]) -> tuple[int, int]:
    """Tokens that are missing, and tokens that are too many."""
    lost = extra = 0
    for kind, a, b, c, d in SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if kind != "equal":
            lost += b - a
            extra += d - c
    return lost, extra


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


def _first_difference(expected: Sequence[Any], got: Sequence[Any]) -> int:
    for index, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return index
    return min(len(expected), len(got))


def _compare_logprobs(expected: Sequence[float | None], got: Sequence[float | None], tolerance: float) -> list[str]:
    if len(expected) != len(got):
        return [f"{len(got)} log-probabilities, not {len(expected)}"]
    if any((one is None) != (other is None) for one, other in zip(expected, got, strict=True)):
        return ["a log-probability is missing"]
    pairs = ((one, other) for one, other in zip(expected, got, strict=True) if one is not None and other is not None)
    worst = max((abs(one - other) for one, other in pairs), default=0.0)
    return [f"a log-probability differs by {worst:.1e}"] if worst > tolerance else []


def _compare_alternatives(expected: Sequence[dict[str, float]], got: Sequence[dict[str, float]]) -> list[str]:
    """The most likely tokens at each position; the last of them may change places with one that is as likely."""
    if len(expected) != len(got):
        return [f"top log-probabilities for {len(got)} tokens, not {len(expected)}"]
    for place, (one, other) in enumerate(zip(expected, got, strict=True)):
        for mine, theirs in ((one, other), (other, one)):
            for token, value in mine.items():
                near = theirs.get(token, min(theirs.values(), default=math.inf))
                if abs(near - value) > (LOGPROB_TOLERANCE if token in theirs else TIE):
                    return [f"the top log-probabilities of token {place} differ"]
    return []


def _compare_documents(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Non-streamed answers must be the same JSON but for what is made up anew for each request."""
    return [
        f"field {name!r} of the answer differs"
        for name in sorted((expected.keys() | got.keys()) - _VOLATILE)
        if _stable(expected.get(name)) != _stable(got.get(name))
    ]


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(entry) for name, entry in value.items() if name not in _VOLATILE}
    if isinstance(value, list):
        return [_stable(entry) for entry in value]
    return value
