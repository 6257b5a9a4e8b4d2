"""The warm-up runs both sampling paths, and a failure of it does not keep an instance from serving."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.warmup import warm_up


class Client:
    model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def __init__(self, fails: bool = False, max_num_seqs: int = 16, max_num_batched_tokens: int = 4096) -> None:
        limits = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.vllm_config = SimpleNamespace(scheduler_config=limits)
        self.fails = fails
        self.seen: list[tuple[dict[str, Any], Any]] = []

    async def generate(self, prompt: dict[str, Any], parameters: Any, request_id: str) -> AsyncIterator[None]:
        if self.fails:
            raise RuntimeError("engine is dead")
        self.seen.append((prompt, parameters))
        yield None


async def test_it_samples_greedily_and_with_a_seed_in_batches_of_every_size():
    client = Client()
    await warm_up(client)
    assert {parameters.seed for _, parameters in client.seen} == {None, 1}
    lengths = [parameters.max_tokens for _, parameters in client.seen]
    assert len(lengths) == 8 and len(set(lengths)) == 8, "all end at different steps, so each batch size occurs"
    prompts = [tuple(prompt["prompt_token_ids"]) for prompt, _ in client.seen]
    assert len(set(prompts)) == len(prompts)
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


async def test_it_never_asks_for_more_than_the_engine_runs_at_once():
    client = Client(max_num_seqs=2)
    await warm_up(client)
    assert len(client.seen) == 2


async def test_all_its_prompts_fit_into_one_step():
    client = Client(max_num_batched_tokens=96)
    await warm_up(client)
    assert sum(len(prompt["prompt_token_ids"]) for prompt, _ in client.seen) == 96


async def test_a_failure_is_logged_and_swallowed(caplog: pytest.LogCaptureFixture):
    await warm_up(Client(fails=True))
    assert "warm-up failed" in caplog.text
