"""Streams that a real vLLM wrote are whole answers without a breach, and the same one however they are grouped."""

from __future__ import annotations

import pytest

from benchmarks.exactness import compare
from benchmarks.streams import Answer, Request, answer_from
from tests.fakes.recording import NAMES, Recording


def _answer(recording: Recording, data: bytes) -> Answer:
    return answer_from(Request("recorded", recording.path, {"stream": True}), data)


@pytest.mark.parametrize("name", NAMES)
def test_two_undisturbed_runs_are_exact(name: str) -> None:
    recording = Recording(name)
    fine, coarse = (_answer(recording, b"".join(leg)) for leg in (recording.fine, recording.coarse))
    assert (fine.error, fine.faults, coarse.faults) == ("", [], [])
    assert fine.progress and (fine.text or fine.choice(0).tools or fine.choice(0).reasoning)
    verdict = compare(fine, coarse)
    assert verdict.exact, verdict.differences


@pytest.mark.parametrize("name", NAMES)
def test_two_legs_glued_together_without_a_cut_are_noticed(name: str) -> None:
    recording = Recording(name)
    fine = _answer(recording, b"".join(recording.fine))
    for beginning in recording.unfinished(recording.fine)[1::7]:
        glued = _answer(recording, b"".join(beginning) + b"".join(recording.coarse))
        assert not compare(fine, glued).exact
