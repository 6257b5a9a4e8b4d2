"""What the migration benchmark makes of arrivals and of the panel's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers import Answer, Request
from benchmarks.exactness import Verdict
from benchmarks.live_migration import Migration
from benchmarks.migration_document import write_document
from benchmarks.migration_figures import figures
from benchmarks.migration_shots import Shot, cuts_of, switch_times

ITL = 0.1


def answer(*pauses: float, name: str = "s", counts: dict[int, int] | None = None) -> Answer:
    """A stream whose events come after `pauses` seconds, one token each unless `counts` says otherwise."""
    stream = Answer(Request(name, "/v1/completions", {"stream": True}), stream_id=name)
    when = 0.0
    for index, pause in enumerate(pauses):
        when += pause
        stream.arrivals.append((when, (counts or {}).get(index, 1)))
    return stream


def row(output_tokens: int, name: str = "s", **fields: Any) -> dict[str, Any]:
    return {
        "stream_id": name,
        "outcome": "moved",
        "output_tokens": output_tokens,
        "prompt_tokens": 100,
        "stages": {"tail": 2.0},
        "tail_blocks": 1,
        "tail_bytes": 1_000_000,
        **fields,
    }


def shot(scenario: str, stream: Answer, rows: list[dict[str, Any]], **fields: Any) -> Shot:
    rounds = [
        {"round_index": 0, "kind": "full", "blocks": 0, "bytes": 0, "duration_ms": 5.0, "dirty_blocks": 0}
        | fields.pop("round", {})
    ]
    migration = Migration({"state": "done"}, rounds, rows)
    return Shot(scenario, [stream], [Verdict(stream.request.name)], [migration], [(0.35, 1.2)], **fields)


def test_the_gap_is_the_pause_before_the_first_token_of_the_target() -> None:
    stream = answer(*[ITL] * 5, 0.17, 0.3, *[ITL] * 5)
    (cut,) = cuts_of(stream, [row(5)])
    assert cut.gap_ms == pytest.approx(170)
    assert cut.itl_ms == pytest.approx(100)
    assert cut.in_itl == pytest.approx(1.7)
    assert cut.tokens == 105


def test_a_last_token_of_the_source_that_comes_by_the_replay_does_not_shorten_the_gap() -> None:
    # Token 5 was the source's, and comes at once before the target's first.
    stream = answer(*[ITL] * 4, 0.25, 0.001, *[ITL] * 6)
    (cut,) = cuts_of(stream, [row(5)])
    assert cut.gap_ms == pytest.approx(250)
    # Or both come in one event.
    stream = answer(*[ITL] * 4, 0.26, *[ITL] * 6, counts={4: 2})
    (cut,) = cuts_of(stream, [row(5)])
    assert cut.gap_ms == pytest.approx(260)


def test_several_cuts_of_a_stream_are_told_apart() -> None:
    stream = answer(*[ITL] * 5, 0.15, *[ITL] * 9, 0.19, *[ITL] * 7)
    rows = [row(5), row(15)]
    assert [round(cut.gap_ms) for cut in cuts_of(stream, rows)] == [150, 190]
    assert switch_times(stream, rows) == pytest.approx([0.65, 1.74])


def test_what_did_not_move_has_no_cut() -> None:
    stream = answer(*[ITL] * 8)
    assert shot("busy", stream, [row(5, outcome="stayed")]).cuts == []
    assert cuts_of(stream, [row(5, name="another")]) == []


def test_pauses_of_bystanders_leave_out_the_cut() -> None:
    stream = answer(*[ITL] * 5, 0.4, *[ITL] * 6)
    beside = answer(*[ITL] * 6, 0.2, *[ITL] * 4, name="t")
    pauses = shot("busy", stream, [row(5)], bystanders=[beside]).bystander_pauses()
    assert pauses == pytest.approx([2.0, 1.0])


def test_whole_blocks_count_what_was_written() -> None:
    # 100 + 157 tokens, the last one not yet written: two whole blocks, of which one went in a round and one with the
    # tail, and no partial one.
    stream = answer(*[ITL] * 8)
    assert shot("busy", stream, [row(157, tail_blocks=1)], round={"blocks": 1}).whole_blocks() == (2, 2)
    # One token more, and the tail has a partial block as well.
    assert shot("busy", stream, [row(158, tail_blocks=2)], round={"blocks": 1}).whole_blocks() == (2, 2)


def test_figures_are_ratios_of_the_scenarios() -> None:
    def one(scenario: str, gap: float) -> Shot:
        return shot(scenario, answer(*[ITL] * 5, gap, *[ITL] * 7), [row(5)])

    found = figures(
        [
            one("idle 100", 0.12),
            one("idle 1500", 0.13),
            one("replay 1500", 0.91),
            one("crowd rolling", 0.15),
            one("crowd atomic", 0.3),
            one("crowd stop_and_copy", 0.6),
        ]
    )
    assert found["gap_in_itl_p50_idle"] == pytest.approx(1.25)
    assert found["excess_ms_p50_idle"] == pytest.approx(25)
    assert found["length_ratio"] == pytest.approx(1.083)
    assert found["vs_replay"] == pytest.approx(7)
    assert found["vs_plain_stop_and_copy"] == pytest.approx(4)
    assert found["vs_seed_p99"] == pytest.approx(0.5)
    assert found["gap_in_itl_p50_busy"] is None
    assert found["handovers"] == 3
    assert found["exact"] == [6, 6]


def test_the_document_says_what_was_measured(tmp_path: Path) -> None:
    shots = [shot(name, answer(*[ITL] * 5, 0.2, *[ITL] * 7), [row(5)]) for name in ("idle 1500", "crowd rolling")]
    write_document(tmp_path / "benchmarks.md", shots, figures(shots), "python -m benchmarks.migration")
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| `gap_in_itl_p50_idle` | 2.0 | at most 1.4 | **no** |" in text
    assert "| crowd rolling | handovers | 1 | 1.0 | - | - |" in text
    for name in ("token-rate-load", "token-rate-long"):
        assert f"](images/{name}.svg)" in text
        assert (tmp_path / "images" / f"{name}.svg").stat().st_size > 1000
