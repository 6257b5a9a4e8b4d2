"""The comparison that all fidelity claims rest on must see what it is there to see."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.answers import Answer, Choice, ToolCall
from benchmarks.exactness import Split, Verdict, compare, percentile, verdicts
from benchmarks.live_migration import Migration, MigrationRun, summary
from benchmarks.streams import Request, mixed_requests


def _answer(tokens: list[int], *, repeatable: bool = True, **changes: Any) -> Answer:
    request = Request("greedy", "/v1/completions", {"stream": True}, repeatable)
    answer = Answer(request, stream_id="s1")
    choice = answer.choice(0)
    choice.token_ids = list(tokens)
    choice.text = "".join(chr(97 + token % 26) for token in tokens)
    choice.logprobs = [-token / 100 for token in tokens]
    choice.finish_reason = "length"
    answer.usage = {"prompt_tokens": 7, "completion_tokens": len(tokens), "total_tokens": 7 + len(tokens)}
    answer.arrivals = [(100 + 0.02 * index, 1) for index in range(len(tokens))]
    for name, value in changes.items():
        setattr(choice if hasattr(choice, name) else answer, name, value)
    return answer


def _row(tokens: int, outcome: str = "moved", stream_id: str = "s1", job: str = "j1") -> dict[str, Any]:
    return {"stream_id": stream_id, "outcome": outcome, "output_tokens": tokens, "tail_bytes": 10, "job": job}


TOKENS = list(range(60))


def test_equal_answers_are_exact() -> None:
    verdict = compare(_answer(TOKENS), _answer(TOKENS))
    assert verdict.exact and verdict.lost == verdict.duplicated == 0


def test_a_lost_token_is_counted() -> None:
    verdict = compare(_answer(TOKENS), _answer(TOKENS[:30] + TOKENS[31:]))
    assert (verdict.lost, verdict.duplicated) == (1, 0)
    assert any("token ids differ from token 30" in text for text in verdict.differences)


def test_a_duplicated_token_is_counted() -> None:
    verdict = compare(_answer(TOKENS), _answer([*TOKENS[:30], TOKENS[29], *TOKENS[30:]]))
    assert (verdict.lost, verdict.duplicated) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": "something else"}, "text differs from character 0"),
        ({"finish_reason": "stop"}, "finish reason is 'stop', not 'length'"),
        ({"usage": {"prompt_tokens": 8, "completion_tokens": 60, "total_tokens": 68}}, "usage is"),
        ({"logprobs": [-token / 100 - (0.001 if token == 50 else 0) for token in TOKENS]}, "differs by 1.0e-03"),
        ({"logprobs": []}, "0 log-probabilities, not 60"),
        ({"reasoning": "hm"}, "reasoning differs from character 0"),
        ({"stop_reason": "the end"}, "stop reason is 'the end', not None"),
        ({"tools": {0: ToolCall("call-1", "weather", "{}")}}, "tool calls are [(0, 'weather', '{}')], not []"),
        ({"alternatives": [{"a": -1.0}]}, "top log-probabilities for 1 tokens, not 0"),
        ({"offsets": [3]}, "text offsets"),
        ({"faults": ["[DONE] came twice"]}, "[DONE] came twice"),
        ({"error": "the stream ended without [DONE]"}, "no complete answer"),
    ],
)
def test_each_kind_of_difference_is_named(changes: dict[str, Any], expected: str) -> None:
    verdict = compare(_answer(TOKENS), _answer(TOKENS, **changes))
    assert any(expected in text for text in verdict.differences), verdict.differences


def test_rounding_noise_in_log_probabilities_is_no_difference() -> None:
    noisy = [-token / 100 + 4e-5 for token in TOKENS]
    assert compare(_answer(TOKENS), _answer(TOKENS, logprobs=noisy)).exact


def test_what_vllm_breaks_itself_is_not_a_difference() -> None:
    faults = {"faults": ["choice 0 has a second role"]}
    assert compare(_answer(TOKENS, **faults), _answer(TOKENS, **faults)).exact


def test_choices_are_compared_one_by_one() -> None:
    reference, answer = _answer(TOKENS), _answer(TOKENS)
    reference.choices[1] = Choice(text="b", token_ids=[5, 6, 7])
    answer.choices[1] = Choice(text="b", token_ids=[5, 9, 7])
    verdict = compare(reference, answer)
    assert verdict.differences == ["choice 1: token ids differ from token 1 on (1 lost, 1 extra)"]
    assert [str(split) for split in verdict.splits] == ["choice 1 token 1: 6 became 9, logit gap unknown"]
    del answer.choices[1]
    assert "choices are [0], not [0, 1]" in compare(reference, answer).differences


def test_alternatives_may_change_places_only_where_they_are_as_likely() -> None:
    def alternatives(*rows: dict[str, float]) -> Answer:
        return _answer(TOKENS, alternatives=list(rows))

    expected = alternatives({"a": -1.0, "b": -2.0})
    assert compare(expected, alternatives({"a": -1.00005, "c": -2.0003})).exact
    assert not compare(expected, alternatives({"a": -1.001, "b": -2.0})).exact
    assert not compare(expected, alternatives({"a": -1.0, "c": -2.5})).exact
    assert not compare(expected, alternatives({"c": -1.0, "b": -2.0})).exact


def test_a_tie_is_a_matter_of_the_gap() -> None:
    assert Split(0, 3, 1, 2, gap=4e-4).tied
    assert not Split(0, 3, 1, 2, gap=0.2).tied
    assert not Split(0, 3, 1, 2).tied, "what nobody has weighed is no tie"


def test_what_is_made_up_anew_for_each_answer_is_not_compared() -> None:
    one = {"id": "a", "created": 1, "choices": [{"message": {"tool_calls": [{"id": "t1", "function": {"name": "w"}}]}}]}
    other = {
        "id": "b",
        "created": 2,
        "choices": [{"message": {"tool_calls": [{"id": "t2", "function": {"name": "w"}}]}}],
    }
    assert compare(_answer(TOKENS, document=one), _answer(TOKENS, document=other)).exact


def test_a_stream_that_moved_twice_has_two_cuts_and_requests_of_one_migration_count_together() -> None:
    rows = [_row(20, job="j1"), _row(20, job="j1"), _row(50, job="j2")]
    (verdict,) = verdicts([_answer(TOKENS)], [_answer(TOKENS)], rows)
    assert verdict.cuts == [40, 50] and verdict.cut_at == 40 and verdict.counted


def test_whole_answers_differ_only_in_what_they_say() -> None:
    document = {"object": "chat.completion", "choices": [{"message": {"content": "x"}}], "usage": {"total_tokens": 3}}
    other = {**document, "choices": [{"message": {"content": "y"}}]}
    assert compare(_answer(TOKENS, document=document), _answer(TOKENS, document=dict(document))).exact
    verdict = compare(_answer(TOKENS, document=document), _answer(TOKENS, document=other))
    assert verdict.differences == ["field 'choices' of the answer differs"]


def test_an_unrepeatable_stream_must_deliver_what_usage_bills() -> None:
    short = _answer(TOKENS[:-1], repeatable=False, usage={"completion_tokens": 60})
    verdict = compare(_answer([1, 2, 3]), short)
    assert (verdict.lost, verdict.duplicated) == (1, 0)
    assert not verdict.exact
    assert compare(_answer([1, 2, 3]), _answer(TOKENS, repeatable=False)).exact


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        (_row(30), True),
        (_row(10), True),
        (_row(50), True),
        (_row(9), False),
        (_row(51), False),
        (_row(30, outcome="finished"), False),
        (_row(30, stream_id="other"), False),
    ],
)
def test_only_streams_with_enough_on_both_sides_count(row: dict[str, Any], counted: bool) -> None:
    (verdict,) = verdicts([_answer(TOKENS)], [_answer(TOKENS)], [row])
    assert verdict.counted is counted


def test_the_gap_is_the_time_without_a_token_at_the_cut() -> None:
    arrivals = [(100 + 0.02 * index + (0.5 if index >= 30 else 0), 1) for index in range(60)]
    answer = _answer(TOKENS, arrivals=arrivals)
    (verdict,) = verdicts([_answer(TOKENS)], [answer], [_row(30)])
    assert verdict.gap_ms == pytest.approx(520)
    assert verdict.itl_ms == pytest.approx(20)


def test_a_pause_just_before_the_last_token_of_the_source_is_part_of_the_gap() -> None:
    # The source's token 30 came through the target's replay, so the client waited for it and not for the next one.
    arrivals = [(100 + 0.02 * index + (0.5 if index >= 29 else 0), 1) for index in range(60)]
    (verdict,) = verdicts([_answer(TOKENS)], [_answer(TOKENS, arrivals=arrivals)], [_row(30)])
    assert verdict.gap_ms == pytest.approx(520)
    assert verdict.itl_ms == pytest.approx(20)


def test_events_with_several_tokens_are_counted_by_tokens() -> None:
    arrivals = [(100.0, 1), (100.1, 29), (100.9, 15), (101.0, 15)]
    (verdict,) = verdicts([_answer(TOKENS)], [_answer(TOKENS, arrivals=arrivals)], [_row(30)])
    assert verdict.gap_ms == pytest.approx(800)


def test_the_summary_counts_only_what_was_cut() -> None:
    found = [
        Verdict("a", cuts=[30], counted=True, gap_ms=40.0, itl_ms=20.0),
        Verdict("b", differences=["text differs"], lost=2, cuts=[30], counted=True, gap_ms=90.0, itl_ms=30.0),
        Verdict("c", differences=["text differs"], lost=7),
    ]
    migration = Migration({"state": "done", "bytes_total": 140}, [{}, {}], [_row(30), _row(30, "stayed")])
    assert summary(MigrationRun([], [], found, [migration])) == {
        "streams": 2,
        "moved": 1,
        "identical": 1,
        "lost_tokens": 2,
        "duplicated_tokens": 0,
        "rounds": 2,
        "bytes": 140,
        "gap_ms_p50": 40.0,
        "gap_ms_p99": 90.0,
        "gap_in_itl_p99": 3.0,
    }


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0


def test_requests_of_one_run_share_no_prompt() -> None:
    requests = mixed_requests(8, salt=3, whole=2)
    prompts = [str(request.body.get("messages") or request.body["prompt"]) for request in requests]
    assert len({prompt[:60] for prompt in prompts}) == len(requests)
    assert len({request.name for request in requests}) == len(requests)
    assert not set(prompts) & {str(r.body.get("messages") or r.body["prompt"]) for r in mixed_requests(8, salt=4)}
