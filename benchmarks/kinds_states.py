"""Rows about where a request is and what surrounds it, and about requests that stay."""

from __future__ import annotations

from benchmarks.kinds import CHAT, TEXT, Kind, prompt

__all__ = ["ADAPTERS", "REFUSED", "STATES", "STATIC"]


def _shared(number: int) -> str:
    """Prompts whose first block (128 tokens) and more are the same for all requests of one batch."""
    return f"{prompt(number // 100)} {prompt(number // 100 + 1)} This is part {number % 100}. Continue it."


STATES: list[Kind] = [
    Kind("prefix-cache hits on the target", CHAT, {"temperature": 0}, text=_shared, warm=True),
    Kind("prefix-cache hits on the target, seeded", TEXT, {"temperature": 1.0, "seed": 50}, text=_shared, warm=True),
    Kind("prompts with a common beginning", TEXT, {"temperature": 1.0, "seed": 51}, text=_shared, copies=3),
    Kind("priority", CHAT, {"temperature": 0, "priority": 3}),
    Kind("ends in the step of the freeze", TEXT, {"temperature": 0, "max_tokens": 40}, copies=3, ends=True),
]

ADAPTERS: list[Kind] = [
    Kind("LoRA adapter, greedy", CHAT, {"temperature": 0, "model": "warm"}, stack="tools"),
    Kind("LoRA adapter, seeded, not streamed", TEXT, {"temperature": 0.9, "seed": 52, "model": "warm"}).but(
        stack="tools", streamed=False
    ),
    Kind("another LoRA adapter beside it", CHAT, {"temperature": 0.7, "seed": 53, "model": "cold"}, stack="tools"),
    Kind("the base model beside adapters", TEXT, {"temperature": 0}, stack="tools"),
]

REFUSED: list[Kind] = [
    Kind("prompt_logprobs", TEXT, {"temperature": 0, "prompt_logprobs": 0}, refused="prompt_logprobs", streamed=False),
    Kind(
        "echo with logprobs",
        TEXT,
        {"temperature": 0, "echo": True, "logprobs": 1},
        refused="prompt_logprobs",
        streamed=False,
    ),
    Kind("beam search", TEXT, {"temperature": 0, "n": 2, "use_beam_search": True}, refused="no_proxy").but(
        streamed=False
    ),
]

#: Rows that no run on this machine can show: the code, and what shows it instead.
STATIC: list[tuple[str, str]] = [
    ("half prefilled with a seed, on a CPU", "refused: `seeded_prefill` (stock vLLM ends its engine there; unit test)"),
    ("pooling", "refused: `pooling` (unit test)"),
    ("streaming-input sessions", "refused: `streaming_input` (unit test)"),
    ("prompt_embeds", "refused: `prompt_embeds` (unit test)"),
    ("multimodal requests", "refused: `multimodal` (unit test)"),
    ("draft-model and n-gram speculation", "refused: `speculative_decoding` (unit test)"),
    ("encoder-decoder, mamba and hybrid models", "the instance refuses all: probe `single_full_attention_group`"),
    ("thinking budget", "refused: `thinking_budget` (unit test)"),
    ("best_of above n", "refused: `best_of` (unit test)"),
    ("responses in the background", "refused: `background` (unit test)"),
    ("responses that continue an earlier one", "refused: `previous_response` (unit test)"),
    ("responses with tools that the instance runs", "refused: `server_tools` (unit test)"),
    ("responses with custom tools, streamed", "refused: `custom_tools` (unit test)"),
]
