"""A replay reaches the reader of its stream in a delta of its own.

Real: vLLM's output handler, output processor, collector and `AsyncLLM.generate`. Not real: the engine core, whose
messages have all arrived before the front end looks at the first.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_plugin.replay import DEFAULT_SLICE, SLICE_VARIABLE, apart, end_apart

pytest.importorskip("vllm")

REPLAYED = list(range(1, 41))
NEXT = [50, 51, 52]


def output(tokens: list[int], request_id: str = "r", ends: bool = False, logprobs: Any = None) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.LENGTH if ends else None
    return EngineCoreOutput(request_id, list(tokens), new_logprobs=logprobs, finish_reason=reason)


async def read(messages: list[list[Any]], requests: tuple[str, ...] = ("r",)) -> dict[str, list[list[int]]]:
    """Feeds `messages` to a front end; returns the token ids of each delta that the readers of `requests` got."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    arrived: asyncio.Queue[Any] = asyncio.Queue()
    for message in messages:
        arrived.put_nowait(EngineCoreOutputs(outputs=message))
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.output_handler = llm.logger_manager = None
    llm.log_stats = llm.log_requests = False
    llm.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
    llm.engine_core = SimpleNamespace(get_output_async=arrived.get, shutdown=lambda timeout=None: None)
    llm.output_processor = OutputProcessor(None, log_stats=False)

    params = SamplingParams(max_tokens=100, detokenize=False, output_kind=RequestOutputKind.DELTA)
    parked: dict[str, Any] = {}
    for name in requests:
        request = EngineCoreRequest(name, [1], None, params, None, 0.0, None, None, None, external_req_id=name)
        parked[name] = RequestOutputCollector(RequestOutputKind.DELTA, name)
        llm.output_processor.add_request(request, None, None, 0, parked[name])

    async def collector_of(request_id: str, *_: Any, **__: Any) -> Any:
        return parked[request_id]

    llm.add_request = collector_of

    async def reader(name: str) -> list[list[int]]:
        return [list(delta.outputs[0].token_ids) async for delta in llm.generate("", params, name)]

    readers = [asyncio.create_task(reader(name)) for name in requests]
    await asyncio.sleep(0.01)  # They wait, as those of parked requests do.
    llm._run_output_handler()
    try:
        return dict(zip(requests, await asyncio.wait_for(asyncio.gather(*readers), 20), strict=True))
    finally:
        llm.output_handler.cancel()


def afterwards() -> list[list[Any]]:
    """The next steps, anew each time: vLLM merges lists in place."""
    return [[output(NEXT[:1])], [output(NEXT[1:2])], [output(NEXT[2:], ends=True)]]


async def test_what_follows_is_merged_into_a_replay_as_vllm_would_send_it():
    assert await read([[output(REPLAYED)], *afterwards()]) == {"r": [REPLAYED + NEXT]}


@pytest.mark.parametrize("slice_size", [None, "1", "3", "500"])
async def test_a_replay_is_a_delta_of_its_own(monkeypatch: pytest.MonkeyPatch, slice_size: str | None):
    if slice_size is not None:
        monkeypatch.setenv(SLICE_VARIABLE, slice_size)
    deltas = (await read([apart([output(REPLAYED)]), *afterwards()]))["r"]
    assert deltas[0] == REPLAYED
    assert [token for delta in deltas[1:] for token in delta] == NEXT


async def test_the_replays_of_all_members_are_deltas_of_their_own():
    message = apart([output(REPLAYED, "r"), output([7, 8], "s")])
    deltas = await read([message, [output([9], "s", ends=True), output([60], "r", ends=True)]], ("r", "s"))
    assert deltas == {"r": [REPLAYED, [60]], "s": [[7, 8], [9]]}


async def test_an_ended_request_ends_in_a_delta_of_its_own():
    assert await read([apart(end_apart(output(REPLAYED, ends=True)))]) == {"r": [REPLAYED[:-1], REPLAYED[-1:]]}


async def test_one_by_one_is_possible():
    assert await read([apart([output([token]) for token in REPLAYED]), *afterwards()[2:]]) == {
        "r": [[token] for token in [*REPLAYED, NEXT[2]]]
    }


def test_the_end_takes_its_log_probabilities_along():
    from vllm.v1.outputs import LogprobsLists

    rows = LogprobsLists(np.arange(6).reshape(3, 2), np.arange(6.0).reshape(3, 2), np.arange(3))
    before, end = end_apart(output([1, 2, 3], ends=True, logprobs=rows))
    assert (before.new_token_ids, before.finish_reason) == ([1, 2], None)
    assert (end.new_token_ids, end.finish_reason is not None) == ([3], True)
    assert before.new_logprobs.logprob_token_ids.tolist() == [[0, 1], [2, 3]]
    assert end.new_logprobs.logprob_token_ids.tolist() == [[4, 5]]
    whole = output([1, 2])
    assert end_apart(whole) == [whole] and len(end_apart(output([1], ends=True))) == 1


def test_the_default_slice_is_vllms(monkeypatch: pytest.MonkeyPatch):
    from vllm import envs

    monkeypatch.delenv(SLICE_VARIABLE, raising=False)
    assert envs.environment_variables[SLICE_VARIABLE]() == DEFAULT_SLICE
