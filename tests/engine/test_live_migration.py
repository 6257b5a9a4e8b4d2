"""Streams that are cut in the middle and go on elsewhere, token by token the same as when undisturbed."""

from __future__ import annotations

from benchmarks.exactness import MIN_SIDE
from benchmarks.live_migration import summary
from benchmarks.ping_pong import long_request, ping_pong, undisturbed
from benchmarks.streams import mixed_requests
from tests.engine.conftest import RunningStack


def test_eight_mixed_streams_and_two_whole_answers_survive_a_cut(stack: RunningStack) -> None:
    source, target = stack.active(), stack.standby()
    requests = mixed_requests(8, tokens=240, salt=2, whole=2)
    blocks = [stack.free_blocks(instance) for instance in (source, target)]

    run = stack.migrate_under_load(requests)

    assert run.migration.job["state"] == "done", run.migration.job
    prompts = [answer.usage["prompt_tokens"] for answer in run.answers if answer.request.streamed]
    assert min(prompts) >= 90 and max(prompts) <= 700, prompts
    for verdict, answer in zip(run.verdicts, run.answers, strict=True):
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
        assert verdict.cut_at is not None, f"{verdict.name} was not moved"
        assert verdict.cut_at >= MIN_SIDE and len(answer.token_ids) - verdict.cut_at >= MIN_SIDE, verdict
        assert len(answer.token_ids) >= 150
    line = summary(run)
    assert (line["streams"], line["identical"], line["moved"]) == (10, 10, 10)
    assert line["lost_tokens"] == line["duplicated_tokens"] == 0
    assert line["rounds"] >= 2 and line["bytes"] > 0
    assert (stack.active().id, stack.standby().id) == (target.id, source.id)
    # What was lent to the session comes back when it is closed on both sides.
    stack.until(lambda: [stack.free_blocks(instance) for instance in (source, target)] == blocks)


def test_one_stream_goes_to_and_fro_and_no_block_is_lost(stack: RunningStack) -> None:
    sides = stack.remember_roles()
    request = long_request(200, number=61)
    reference = stack.wait(undisturbed(sides[0], request))
    # Slow steps, so that a short stream is long enough for all moves.
    with stack.faults(sides[0], step_delay_s=0.1), stack.faults(sides[1], step_delay_s=0.1):
        result = stack.wait(ping_pong(stack.stack, sides, request, reference, moves=4))
    assert result["exact"], result["differences"]
    assert result["moves"] == 4, result
    assert result["free_blocks"]["before"] == result["free_blocks"]["after"], result
