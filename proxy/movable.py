"""Which requests can have a second leg: those whose answer a front end repeats exactly from all tokens at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MOVABLE_PATHS", "Refusal", "refusal"]

MOVABLE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


@dataclass(frozen=True)
class Refusal:
    """Why a request stays where it is: a code for programs, one sentence for people."""

    code: str
    message: str


def refusal(path: str, body: dict[str, Any]) -> Refusal | None:
    """Returns why the request must not get a second leg, None if it may.

    Args:
        path: with or without a query string.
        body: as the client sent it; an absent field and a null one mean the same.
    """
    if path.partition("?")[0] not in MOVABLE_PATHS:
        return Refusal("not_a_movable_route", f"Requests to {path.partition('?')[0]} are relayed, but never moved.")
    if _above_one(body.get("n")) or _above_one(body.get("best_of")) or _several_prompts(body.get("prompt")):
        return Refusal(
            "several_choices", "The request has several choices or prompts; only a single answer can be moved."
        )
    if (body.get("tools") or body.get("functions")) and body.get("tool_choice") != "none":
        return Refusal(
            "tools", "The request offers tools, whose parser cannot repeat its events exactly on another side."
        )
    if body.get("use_beam_search"):
        return Refusal("beam_search", "The request uses beam search, whose state lives in the front end.")
    if body.get("echo"):
        return Refusal("echo", "The request echoes its prompt, which the other side would not repeat in the same way.")
    if body.get("prompt_logprobs") is not None:
        return Refusal("prompt_logprobs", "The request asks for prompt log probabilities, which only its instance has.")
    return None


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)
