"""What only the API server knows of an instance: how it turns text into tokens and back, and which LoRA adapters it
serves. Told to the engine with every question for its status, for both change the answers of moved requests.

Read from vLLM, with nothing replaced: `AsyncLLM.tokenizer`, `OpenAIServingModels.lora_requests` in the application's
state, and the parsed arguments.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from argparse import Namespace
from pathlib import Path
from typing import Any

__all__ = ["FrontEnd", "adapter_fingerprint", "tokenizer_fingerprint"]

#: The files that make up an adapter (vllm/lora/lora_model.py).
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")
#: Switches of the server that change what an answer says without being asked to by its request.
_ANSWER_OPTIONS = (
    "return_tokens_as_token_ids",
    "enable_prompt_tokens_details",
    "enable_force_include_usage",
    "enable_per_request_metrics",
)
_NONE = "none"


class FrontEnd:
    """Asks for the facts again each time: adapters come and go while the server runs. Files are read once."""

    def __init__(self, engine_client: Any, state: Any, args: Namespace) -> None:
        self._engine_client = engine_client
        self._state = state
        self._args = args
        self._fixed: dict[str, str] | None = None
        # With the request object itself: an adapter that is loaded anew under its old name gets a new one.
        self._adapters: dict[str, tuple[Any, str]] = {}

    async def facts(self) -> dict[str, Any]:
        """Returns factors by name, and under `adapters` the fingerprint of each adapter by its name."""
        if self._fixed is None:
            self._fixed = await asyncio.to_thread(self._read_fixed)
        loaded = dict(getattr(getattr(self._state, "openai_serving_models", None), "lora_requests", None) or {})
        for name, request in loaded.items():
            if name not in self._adapters or self._adapters[name][0] is not request:
                self._adapters[name] = (request, await asyncio.to_thread(adapter_fingerprint, request.lora_path))
        self._adapters = {name: known for name, known in self._adapters.items() if name in loaded}
        adapters = {name: fingerprint for name, (_, fingerprint) in sorted(self._adapters.items())}
        return {**self._fixed, "adapters": adapters}

    def _read_fixed(self) -> dict[str, str]:
        tokenizer, args = getattr(self._engine_client, "tokenizer", None), self._args
        reasoning = getattr(getattr(args, "structured_outputs_config", None), "reasoning_parser", None)
        if reasoning and getattr(args, "enable_force_include_usage", False):
            # Every stream then tells the number of reasoning tokens, whether the client asked or not.
            reasoning += " with usage"
        # Without the second flag vLLM makes no tool parser, whatever the first says.
        tool = getattr(args, "tool_call_parser", None) if getattr(args, "enable_auto_tool_choice", False) else None
        if tool and os.environ.get("VLLM_ENFORCE_STRICT_TOOL_CALLING", "1").lower() not in ("true", "1"):
            # It changes what the parser reads under `required` and named tools.
            tool += " without strict calls"
        return {
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "chat_template": _chat_template_fingerprint(tokenizer, args),
            "tool_parser": _parser(tool, getattr(args, "tool_parser_plugin", None)),
            "reasoning_parser": _parser(reasoning, getattr(args, "reasoning_parser_plugin", None)),
            "answer_options": ", ".join(name for name in _ANSWER_OPTIONS if getattr(args, name, False)) or _NONE,
        }


def _parser(name: str | None, plugin: str | None) -> str:
    """The name; with the file of the plugin that may have put another parser under it."""
    return f"{name} of {plugin}" if name and plugin else name or _NONE


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Class and digest of all that turns text into tokens and back: two folders with the same files agree, two
    tokenizers with the same name need not."""
    if tokenizer is None:
        return _NONE
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        content = json.loads(backend.to_str())
        # Set by callers for their own batches, not by the files.
        for setting in ("truncation", "padding"):
            content.pop(setting, None)
    else:
        content = sorted(tokenizer.get_vocab().items())
    return _digest(json.dumps(content, sort_keys=True).encode())


def adapter_fingerprint(path: str) -> str:
    """Digest of an adapter's files; of its name where it comes from a hub. One whose files cannot be read equals no
    other."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return "hub-" + _digest(path.encode())
    digest = hashlib.sha256()
    try:
        files = sorted({file for pattern in _ADAPTER_FILES for file in folder.glob(pattern)})
        for file in files:
            with file.open("rb") as content:
                digest.update(f"{file.name}:{hashlib.file_digest(content, 'sha256').hexdigest()};".encode())
    except OSError:
        files = []
    return digest.hexdigest()[:16] if files else f"unreadable-{secrets.token_hex(4)}"


def _chat_template_fingerprint(tokenizer: Any, args: Namespace) -> str:
    given = getattr(args, "chat_template", None)
    if given and Path(given).is_file():
        given = Path(given).read_text()
    template = given or getattr(tokenizer, "chat_template", None) or _NONE
    defaults = getattr(args, "default_chat_template_kwargs", None) or {}
    return _digest(json.dumps([template, defaults], sort_keys=True, default=str).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
