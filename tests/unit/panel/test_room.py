"""Which requests a target has room for: oldest first, with what they will write soon."""

from __future__ import annotations

import math
from typing import Any

from migrations_app.room import Room, blocks_needed, choose, oldest_first, sizes, why_not


def row(name: str, blocks: int, *, age_s: float = 1.0, tokens: int = 0, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "kv_blocks": blocks, "prompt_tokens": tokens, "age_s": age_s, **more}


def room(free: int, *requests: dict[str, Any], **load: int) -> Room:
    status = {"kv": {"free_blocks": free, "total_blocks": 100, "block_size": 16}, "requests": load}
    return Room.of(status, requests)


def names(rows: list[Any]) -> list[str]:
    return [one["request_id"] for one in rows]


def test_a_request_needs_what_it_has_and_what_it_will_write_soon() -> None:
    # One that the handover holds ahead, and one that the target keeps free once it runs there.
    assert blocks_needed(row("one", 5), 16) == 7
    assert blocks_needed(row("four choices", 20, tokens=80 * 4, choices=4, max_tokens=1000), 16) == 28


def test_one_that_waits_on_the_source_needs_blocks_for_its_tokens() -> None:
    assert blocks_needed(row("waiting", 0, tokens=100, max_tokens=4), 16) == 9


def test_the_oldest_go_first_and_one_that_does_not_fit_is_passed_over() -> None:
    rows = [row("new", 3, age_s=1), row("old", 3, age_s=9), row("large", 50, age_s=5), row("middle", 3, age_s=4)]
    assert names(oldest_first(rows)) == ["old", "large", "middle", "new"]
    chosen, left = choose(rows, room(12))
    assert (names(chosen), names(left)) == (["old", "middle"], ["large", "new"])


def test_what_runs_on_the_target_keeps_room_to_grow() -> None:
    there = [row("there", 10, tokens=160, max_tokens=1000)] * 3
    assert room(10, *there).blocks == 7
    assert (room(2, *there).blocks, room(2, *there).free) == (0, 2)
    # What waits there without blocks came later than what is to come.
    assert room(5, row("queued", 0, tokens=150)).blocks == 5


def test_run_slots_are_room_too() -> None:
    rows = [row(str(number), 1, age_s=10 - number) for number in range(4)]
    chosen, left = choose(rows, room(100, running=12, waiting=2, run_slots=16))
    assert (names(chosen), names(left)) == (["0", "1"], ["2", "3"])
    assert room(100, running=12).slots == math.inf
    assert room(100, running=20, run_slots=16).slots == 0
    assert why_not(left[0], room(100, running=16, run_slots=16))[0] == "target_out_of_run_slots"


def test_it_says_why_not_in_numbers() -> None:
    code, sentence = why_not(row("large", 50), room(20, row("there", 10)))
    assert code == "target_out_of_blocks"
    assert "needs 52 KV blocks" in sentence
    assert "has 20 free, of which it keeps 1 for what runs there" in sentence


def test_sizes_now_and_in_the_end() -> None:
    rows = [row("a", 5, tokens=80, max_tokens=160), row("b", 3, tokens=40, max_tokens=8)]
    assert sizes(rows, 16) == (8, 15 + 3)
