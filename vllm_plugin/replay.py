"""How the target's front end gets what was generated elsewhere: in deltas of its own, never merged with what follows.

vLLM's collector of a stream merges outputs that its reader has not taken yet (v1/engine/output_processor.py,
`RequestOutputCollector`), and some streaming parsers say something else when an answer's end comes in the same delta
as what was before it (docs/parsers.md). Between slices of a message the front end's output handler lets the readers
run (v1/engine/async_llm.py, "Allow other asyncio tasks to run between chunks"), so each output gets a slice of its
own: the rest is filled with outputs of a request that does not exist, which the front end ignores. A reader that is
waiting, as that of a parked request is, has then taken an output before the next one is put.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_plugin.compat import EngineCoreOutput

__all__ = ["apart", "end_apart"]

#: vLLM's default for the outputs of one slice, and the variable that changes it.
DEFAULT_SLICE = 128
SLICE_VARIABLE = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"


def apart(outputs: list[Any]) -> list[Any]:
    """Returns `outputs`, for one message, so far apart that each is read before the next, and before what follows."""
    nobody = EngineCoreOutput(request_id="", new_token_ids=[])
    filling = [nobody] * max(1, int(os.environ.get(SLICE_VARIABLE, DEFAULT_SLICE)))
    return [item for output in outputs for item in (output, *filling)]


def end_apart(output: Any) -> list[Any]:
    """Returns `output` of an ended request as two: its end comes with the last token, as it did on the source."""
    tokens = list(output.new_token_ids)
    if output.finish_reason is None or len(tokens) < 2:
        return [output]
    first, last = len(tokens) - 1, output.new_logprobs
    before = EngineCoreOutput(
        request_id=output.request_id,
        new_token_ids=tokens[:first],
        new_logprobs=None if last is None else last.slice_request(0, first),
        prefill_stats=output.prefill_stats,
    )
    end = EngineCoreOutput(
        request_id=output.request_id,
        new_token_ids=tokens[first:],
        new_logprobs=None if last is None else last.slice_request(first, 1),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
    return [before, end]
