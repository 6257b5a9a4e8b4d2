"""What the scheduler remembers of a request's logprobs survives the way to another engine, whatever the batch
looked like."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vllm_plugin.book import MoveBook, merge_logprobs, own_columns, split_logprobs


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


def test_requests_of_one_stream_are_counted_until_all_have_ended():
    book = MoveBook()
    assert book.record("0_a", "w/1").siblings == 1
    assert book.record("1_a", "w/1").siblings == 2
    book.forget("0_a")
    assert book.record("2_a", "w/1").siblings == 3
    for request_id in ("1_a", "2_a"):
        book.forget(request_id)
    assert book.record("b", "w/1").siblings == 1
