"""Runs an instance's engine before it is announced.

The first passes of an engine are many times slower than the later ones: kernels are chosen for each batch size,
buffers are allocated. On a standby that has never run, the first requests to arrive by a handover would pay for that
in front of their clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from vllm_plugin import compat

__all__ = ["warm_up"]

logger = logging.getLogger("vllm.vllm_hi.warmup")

#: Largest batch that is warmed up; with one request ending after the other, every size below it occurs, too.
BATCH = 8
PROMPT_TOKENS = 32
VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1, "top_p": 0.9, "logprobs": 1, "presence_penalty": 0.1},
)


async def warm_up(engine_client: Any) -> None:
    """Generates a few tokens for several requests at once. Never raises: a cold engine serves, too."""
    started = time.monotonic()
    try:
        scheduling = engine_client.vllm_config.scheduler_config
        # No prompt may be split over two steps: half of them are seeded, and vLLM's CPU build dies of a seeded prefill
        # that goes on (v1/worker/gpu_model_runner.py, `set_offset`).
        batch = min(BATCH, scheduling.max_num_seqs, scheduling.max_num_batched_tokens // PROMPT_TOKENS)
        await asyncio.gather(*(_generate(engine_client, number) for number in range(batch)))
    except Exception:
        logger.exception("vLLM-HI: the warm-up failed; the first requests will be slower")
        return
    logger.info("vLLM-HI: warmed up in %.1f s", time.monotonic() - started)


async def _generate(engine_client: Any, number: int) -> None:
    vocabulary = engine_client.model_config.get_vocab_size()
    # Spread over the vocabulary and different each time, so that no prefix is found in the cache.
    tokens = [(7919 * (number + 1) * (place + 1)) % vocabulary for place in range(PROMPT_TOKENS)]
    variant = VARIANTS[number % len(VARIANTS)]
    parameters = compat.SamplingParams(max_tokens=number + 2, ignore_eos=True, **variant)
    async for _ in engine_client.generate({"prompt_token_ids": tokens}, parameters, f"vllm-hi-warm-up-{number}"):
        pass
