"""Runs an instance's engine once before it is announced.

The first passes of an engine are many times slower than the later ones (kernels are chosen, buffers are
allocated). On a standby that has never run, the first request to arrive by a handover would pay for that in front
of its client.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm_plugin import compat

__all__ = ["warm_up"]

logger = logging.getLogger("vllm.vllm_hi.warmup")

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 8


async def warm_up(engine_client: Any) -> None:
    """Generates a few tokens greedily, and sampled with a seed and logprobs. Never raises: a cold engine serves,
    too."""
    started = time.monotonic()
    try:
        vocabulary = engine_client.model_config.get_vocab_size()
        variants = (
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 1, "top_p": 0.9, "logprobs": 1, "presence_penalty": 0.1},
        )
        for number, variant in enumerate(variants):
            parameters = compat.SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, **variant)
            # Spread over the vocabulary and different each time, so that no prefix is found in the cache.
            tokens = [(7919 * (number + 1) * (place + 1)) % vocabulary for place in range(PROMPT_TOKENS)]
            prompt = {"prompt_token_ids": tokens}
            async for _ in engine_client.generate(prompt, parameters, f"vllm-hi-warm-up-{number}"):
                pass
    except Exception:
        logger.exception("vLLM-HI: the warm-up failed; the first requests will be slower")
        return
    logger.info("vLLM-HI: warmed up in %.1f s", time.monotonic() - started)
