"""The instances that the kinds of the fidelity matrix need: one stack for most, others where a flag would disturb."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks.demo_models import chat_model, lora_adapter
from benchmarks.kinds import REASONING_PARSER, TOOL_PARSER
from benchmarks.live_migration import Panel
from controlplane.serving import InstanceOptions
from controlplane.supervisor import Stack, StackOptions

__all__ = ["MODEL", "STACKS", "Setup", "sides", "stack_of"]

MODEL = "smollm2-135m"
#: Of the model's tokens that never come: these two get the names that reasoning parsers look for.
_THINK = {"<filename>": "<think>", "<gh_stars>": "</think>"}
#: SmolLM2 in float32: 30 layers, keys and values of 3 heads of 64, 128 tokens.
_BLOCK_BYTES = 30 * 2 * 3 * 64 * 128 * 4


@dataclass(frozen=True)
class Setup:
    """How the two instances of one stack are started.

    Attributes:
        arguments: appended to `vllm serve`.
        adapters: names of LoRA adapters to serve beside the model.
        thinking: the tokenizer has tokens for the ends of a reasoning.
        max_num_seqs: run slots.
        kv_blocks: size of the KV cache, None for the usual one.
    """

    arguments: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    thinking: bool = False
    max_num_seqs: int = 16
    kv_blocks: int | None = None

    def options(self, folder: Path) -> InstanceOptions:
        """Makes the options; `folder` takes what has to be written for them."""
        model = chat_model()
        options = InstanceOptions(
            model=str(_thinking_model(model, folder) if self.thinking else model),
            served_model_name=MODEL,
            max_num_seqs=self.max_num_seqs,
            arguments=(*self.arguments, *self._adapter_arguments(model)),
        )
        if self.kv_blocks is None:
            return options
        return replace(options, kv_cache_bytes=self.kv_blocks * _BLOCK_BYTES)

    def _adapter_arguments(self, model: Path) -> list[str]:
        modules = [f"{name}={lora_adapter(model, seed)}" for seed, name in enumerate(self.adapters, 1)]
        if not modules:
            return []
        # One slot more than adapters, which stays empty: vLLM's CPU build takes the last slot's adapter for a request
        # without one that is in a batch with others (lora/ops/torch_ops/lora_ops.py indexes with -1).
        return ["--enable-lora", "--max-loras", str(len(modules) + 1), "--lora-modules", *modules]


STACKS: dict[str, Setup] = {
    "plain": Setup(("--scheduling-policy", "priority")),
    # With a tool parser every chat goes through it, tools or not.
    "tools": Setup(("--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER), adapters=("warm", "cold")),
    "reasoning": Setup(("--reasoning-parser", REASONING_PARSER), thinking=True),
    # Few run slots, few blocks, and a step in which no long prompt has room. Nothing seeded may run here: see
    # `serve_command` about what vLLM's CPU build does when a seeded request's prompt is split.
    "crowded": Setup(("--max-num-batched-tokens", "256"), max_num_seqs=6, kv_blocks=24),
}


def stack_of(name: str, folder: Path, first_port: int, say: Callable[[str], None]) -> Stack:
    """Makes the product around one setup: panel at `first_port` + 2, instances at `first_port` and the next."""
    folder.mkdir(parents=True, exist_ok=True)
    return Stack(
        StackOptions(
            state_dir=folder,
            panel_port=first_port + 2,
            first_instance_port=first_port,
            first_data_port=first_port + 1000,
            instances=STACKS[name].options(folder),
            say=say,
        )
    )


def _thinking_model(model: Path, folder: Path) -> Path:
    """The same model with a tokenizer in which two unused tokens are called as reasoning parsers want them."""
    copy = folder / "model"
    if copy.exists():
        return copy
    copy.mkdir()
    for part in model.iterdir():
        if part.name == "tokenizer.json":
            (copy / part.name).write_text(_renamed(part.read_text()))
        elif part.suffix == ".safetensors":
            (copy / part.name).symlink_to(part)
        else:
            shutil.copy(part, copy / part.name)
    return copy


def _renamed(text: str) -> str:
    tokenizer = json.loads(text)
    for token in tokenizer["added_tokens"]:
        if token["content"] in _THINK:
            token["content"] = _THINK[token["content"]]
            # As with models that think: detokenization must not skip them.
            token["special"] = False
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {_THINK.get(word, word): number for word, number in words.items()}
    return json.dumps(tokenizer, ensure_ascii=False)


async def sides(stack: Stack) -> tuple[str, str]:
    """Ids of the instance that serves now and of the other one: a migration that ended early has not swapped them."""
    headers = {"Authorization": f"Bearer {stack.api_token}"}
    async with aiohttp.ClientSession(stack.url, headers=headers) as session:
        rows = await Panel(session).rows("/api/v1/instances")
    first, second = sorted(rows, key=lambda row: str(row["status"]) != "active")
    return str(first["vllm_hi_id"]), str(second["vllm_hi_id"])
