"""Streams that a real vLLM wrote (`python -m tests.fakes.record`), cut and continued in every place."""

from __future__ import annotations

import itertools

import pytest

from tests.fakes.readers import read
from tests.fakes.recording import NAMES, Recording


def test_there_are_recordings_of_every_route() -> None:
    assert {Recording(name).path for name in NAMES} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    }


@pytest.mark.parametrize("name", NAMES)
def test_one_leg_passes_as_it_is(name: str) -> None:
    recording = Recording(name)
    for leg in (recording.fine, recording.coarse):
        (out,) = recording.relay(leg)
        assert out == b"".join(leg)


@pytest.mark.parametrize("name", NAMES)
def test_the_two_runs_are_the_same_answer_in_other_events(name: str) -> None:
    recording = Recording(name)
    fine, coarse = (b"".join(leg) for leg in (recording.fine, recording.coarse))
    assert len(recording.fine) != len(recording.coarse)
    assert read(recording.path, fine) == read(recording.path, coarse)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("back", [False, True])
def test_wherever_it_moves_the_client_gets_the_whole_answer_once(name: str, back: bool) -> None:
    recording = Recording(name)
    first, second = (recording.coarse, recording.fine) if back else (recording.fine, recording.coarse)
    expected = read(recording.path, b"".join(first))
    beginnings = recording.unfinished(first)
    assert len(beginnings) > 4
    for beginning in beginnings:
        before, after = recording.relay(beginning, second)
        assert before == b"".join(beginning)
        assert read(recording.path, before + after) == expected


@pytest.mark.parametrize("name", NAMES)
def test_it_may_move_twice(name: str) -> None:
    recording = Recording(name)
    expected = read(recording.path, b"".join(recording.fine))
    firsts = recording.unfinished(recording.fine)[::5]
    for one, two in itertools.product(firsts, recording.unfinished(recording.coarse)[::2]):
        assert read(recording.path, b"".join(recording.relay(one, two, recording.fine))) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_leg_that_ends_in_the_middle_of_an_event_loses_nothing(name: str) -> None:
    recording = Recording(name)
    expected = read(recording.path, b"".join(recording.fine))
    for beginning in recording.unfinished(recording.fine)[1::7]:
        torn = [*beginning[:-1], beginning[-1][: len(beginning[-1]) // 2]]
        assert read(recording.path, b"".join(recording.relay(torn, recording.coarse))) == expected
