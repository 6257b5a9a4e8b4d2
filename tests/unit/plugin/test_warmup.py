"""The warm-up runs both sampling paths, and a failure of it does not keep an instance from serving."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.warmup import warm_up


class Client:
    model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[tuple[dict[str, Any], Any]] = []

    async def generate(self, prompt: dict[str, Any], parameters: Any, request_id: str) -> AsyncIterator[None]:
        if self.fails:
            raise RuntimeError("engine is dead")
        self.seen.append((prompt, parameters))
        yield None


async def test_it_samples_greedily_and_with_a_seed():
    client = Client()
    await warm_up(client)
    assert [parameters.seed for _, parameters in client.seen] == [None, 1]
    assert all(0 <= token < 100 for prompt, _ in client.seen for token in prompt["prompt_token_ids"])
    assert client.seen[0][0] != client.seen[1][0]


async def test_a_failure_is_logged_and_swallowed(caplog: pytest.LogCaptureFixture):
    await warm_up(Client(fails=True))
    assert "warm-up failed" in caplog.text
