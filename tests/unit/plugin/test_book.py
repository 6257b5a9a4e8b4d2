"""What the scheduler remembers of a request's logprobs survives the way to another engine, whatever the batch
looked like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_plugin.book import MAX_INCOMPLETE, MoveBook, member_key, merge_logprobs, own_columns, split_logprobs


class Lists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any


def step(width: int, start: int) -> Lists:
    ids = np.arange(start, start + width, dtype=np.int32).reshape(1, width)
    return Lists(ids, -ids.astype(np.float32), np.array([start], dtype=np.int64))


def test_rows_of_steps_with_wider_neighbours_are_joined():
    steps = [own_columns(step(width, start), 1) for width, start in ((2, 10), (4, 20), (2, 30))]
    rows = merge_logprobs(steps)
    assert rows is not None and (rows.rows, rows.columns) == (3, 2)
    back = split_logprobs(rows, Lists)
    assert back.logprob_token_ids.tolist() == [[10, 11], [20, 21], [30, 31]]
    assert back.logprobs.tolist() == [[-10, -11], [-20, -21], [-30, -31]]
    assert back.sampled_token_ranks.tolist() == [10, 20, 30]


def test_no_logprobs_is_nothing_to_send():
    assert merge_logprobs([]) is None


def request(request_id: str) -> SimpleNamespace:
    one = SimpleNamespace(request_id=request_id, finished=False)
    one.is_finished = lambda: one.finished
    return one


def end(book: MoveBook, one: SimpleNamespace) -> None:
    one.finished = True
    book.forget(one.request_id)


def test_the_history_of_a_choice_is_kept_as_long_as_another_one_runs():
    book, first, second = MoveBook(), request("0_a"), request("1_a")
    for one in (first, second):
        book.record(one, "w/1", choices=2)
    end(book, first)
    record = book.stream_of["1_a"]
    assert list(record.members) == ["0_a", "1_a"] and [m.request_id for m in record.live] == ["1_a"]
    assert record.request_id == "0_a", "the name of the whole does not change when a member ends"
    end(book, second)
    assert not book.records and not book.streams and not book.stream_of


def test_a_choice_that_ends_before_the_others_have_come_belongs_to_them():
    book, first, second = MoveBook(), request("a"), request("b")
    book.record(first, "w/1", choices=2)
    end(book, first)
    book.record(second, "w/1", choices=2)
    assert len(book.stream_of["b"].members) == 2 and book.stream_of["b"].complete


def test_two_legs_of_one_stream_are_told_apart():
    book = MoveBook()
    book.record(request("old"), "w/1")
    book.record(request("new"), "w/1", "ticket")
    assert len(book.stream_of["old"].members) == len(book.stream_of["new"].members) == 1


def test_streams_that_never_became_complete_are_not_kept_for_ever():
    book = MoveBook()
    for number in range(MAX_INCOMPLETE + 5):
        one = request(str(number))
        book.record(one, f"w/{number}", choices=2)
        end(book, one)
    assert len(book.streams) == MAX_INCOMPLETE
    assert "0" not in book.records and str(MAX_INCOMPLETE + 4) in book.records


@pytest.mark.parametrize(
    ("request_id", "key"),
    [
        ("chatcmpl-5eed-1-0123abcd", (0, 0)),
        ("chatcmpl-5eed-2-01234567", (0, 0)),
        ("2_chatcmpl-5eed-2-01234567", (0, 2)),
        ("cmpl-5eed-1-3-0123abcd", (3, 0)),
        ("1_cmpl-5eed-1-3-0123abcd", (3, 1)),
        ("cmpl-5eed-1-3", (3, 0)),
        ("something else", None),
    ],
)
def test_prompt_and_choice_are_read_from_the_id(request_id: str, key: tuple[int, int] | None):
    assert member_key(request_id, "5eed") == key
