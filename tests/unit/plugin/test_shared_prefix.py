"""Which blocks go in which pass of a round: a prefix that several requests share crosses the wire once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_plugin.move import Member, Move
from vllm_plugin.rounds import _passes


def stream(ticket: str, *members: Member) -> Move:
    return Move(members[0].request_id, "w1/s1", ticket, list(members), prompt_tokens=5, kv_blocks=1, state="copying")


def snapshots(**blocks: list[int]) -> Any:
    return {request_id: SimpleNamespace(block_ids=ids) for request_id, ids in blocks.items()}


def ids(parts: list[Any]) -> list[str]:
    return [member.request_id for _, _, member in parts]


def test_requests_without_a_common_block_go_in_one_pass():
    moves = [stream("t1", Member("a", 0)), stream("t2", Member("b", 0))]
    assert [ids(one) for one in _passes(moves, snapshots(a=[1, 2], b=[3, 4]))] == [["a", "b"]]


def test_followers_wait_until_the_first_of_them_has_been_sent():
    moves = [stream("t1", Member("a", 0), Member("b", 0)), stream("t2", Member("c", 0)), stream("t3", Member("d", 0))]
    passes = _passes(moves, snapshots(a=[1, 2], b=[1, 3], c=[1, 4], d=[9]))
    assert [ids(one) for one in passes] == [["a", "d"], ["a", "b", "c"]]
    # The leader comes along in the second pass: that is how the target hears that its blocks are complete.
    assert passes[1][0][2] is moves[0].members[0]


def test_who_has_blocks_on_the_target_already_follows_nobody():
    moves = [stream("t1", Member("a", 0)), stream("t2", Member("b", 0, hit_tokens=0, sent_blocks=2))]
    assert [ids(one) for one in _passes(moves, snapshots(a=[1, 2], b=[1, 3]))] == [["a", "b"]]


def test_a_latecomer_follows_those_that_were_sent_in_an_earlier_round():
    moves = [stream("t1", Member("a", 0, hit_tokens=0, sent_blocks=2)), stream("t2", Member("b", 0))]
    passes = _passes(moves, snapshots(a=[1, 2], b=[1, 3]))
    assert [ids(one) for one in passes] == [["a"], ["a", "b"]]


def test_members_that_have_ended_have_no_blocks_to_send():
    moves = [stream("t1", Member("a", 0, ended=True), Member("b", 0))]
    assert [ids(one) for one in _passes(moves, snapshots(b=[1]))] == [["b"]]
