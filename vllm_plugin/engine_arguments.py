"""Engine arguments of a standby that is brought up: its own, what the job wishes, and what it must have of the source.

The source reports what matters of its arguments when it registers (`reported`), and the panel hands that to the
standby. Only what is named here is taken, by form and by name: no path of the source's host but those of LoRA
adapters, and nothing that runs code (`--trust-remote-code`, parser plugins). A standby that needs these is started
with them.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from vllm_plugin.calls import Call

__all__ = ["EngineArguments", "Instantiate", "LoraModule", "OwnArguments", "options", "reported"]

#: A value that cannot be taken for an option.
_Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:+/-]*$", max_length=128)]
_Text = Annotated[str, msgspec.Meta(pattern=r"^[^-\s\x00-\x1f][^\x00-\x1f]*$", max_length=512)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
MAX_TEMPLATE = 256 * 1024


class LoraModule(msgspec.Struct, forbid_unknown_fields=True):
    name: _Text
    path: _Text


class EngineArguments(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Those of a running instance that another one needs to be the same to its clients. None: it was not given."""

    served_model_name: list[_Text] | None = None
    dtype: _Word | None = None
    kv_cache_dtype: _Word | None = None
    block_size: _Count | None = None
    quantization: _Word | None = None
    max_model_len: _Count | None = None
    max_num_seqs: _Count | None = None
    max_num_batched_tokens: _Count | None = None
    tensor_parallel_size: _Size | None = None
    pipeline_parallel_size: _Size | None = None
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    enforce_eager: bool | None = None
    tool_call_parser: _Word | None = None
    enable_auto_tool_choice: bool | None = None
    reasoning_parser: _Word | None = None
    #: The template itself, wherever its file lies.
    chat_template: Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)] | None = None
    return_tokens_as_token_ids: bool | None = None
    enable_prompt_tokens_details: bool | None = None
    enable_force_include_usage: bool | None = None
    enable_per_request_metrics: bool | None = None
    enable_lora: bool | None = None
    max_loras: _Count | None = None
    max_lora_rank: _Count | None = None
    lora_modules: list[LoraModule] | None = None


class Instantiate(Call):
    """Body of `POST /vllm_hi/migration/instantiate`. What is null is as the standby was started, else as the source."""

    tensor_parallel_size: _Size | None = None
    pipeline_parallel_size: _Size | None = None
    gpu_memory_utilization: _Fraction | None = None
    model: _Text | None = None
    engine_args: EngineArguments = msgspec.field(default_factory=EngineArguments)
    deadline_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 900.0


#: Both instances must agree on these (vllm_plugin/compatibility.py): the source's value counts.
_MUST_AGREE = (
    "served_model_name",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "reasoning_parser",
    "return_tokens_as_token_ids",
    "enable_prompt_tokens_details",
    "enable_force_include_usage",
    "enable_per_request_metrics",
)
#: The standby's own value counts where it was started with one.
_UNLESS_OWN = (
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "scheduling_policy",
    "enforce_eager",
)
#: A standby with adapters of its own keeps all of these.
_LORA = ("enable_lora", "max_loras", "max_lora_rank", "lora_modules")
#: Those that say the same whatever the instance's own resolved value is.
_AS_GIVEN = (
    "kv_cache_dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "enforce_eager",
    "enable_auto_tool_choice",
    "return_tokens_as_token_ids",
    "enable_prompt_tokens_details",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
)


class OwnArguments:
    """What a standby was started with: parsed values, those of the options that were not given, and which there are."""

    def __init__(self, values: Namespace, parser: ArgumentParser) -> None:
        self.values = values
        self.names = {option for action in parser._actions for option in action.option_strings}
        self._default: Callable[[str], Any] = parser.get_default

    def has(self, name: str) -> bool:
        """True where the operator gave this argument another value than vLLM does."""
        return bool(getattr(self.values, name, None) != self._default(name))


def options(wish: Instantiate, own: OwnArguments, folder: Path) -> list[str]:
    """Options to append to the standby's own command line: of an option that comes twice, the last one counts.

    Args:
        folder: takes the chat template.
    """
    source = wish.engine_args
    chosen: dict[str, Any] = {name: getattr(source, name) for name in _MUST_AGREE}
    chosen |= {name: getattr(source, name) for name in _UNLESS_OWN if not own.has(name)}
    if not own.has("enable_lora") and source.enable_lora:
        chosen |= {name: getattr(source, name) for name in _LORA}
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"):
        if getattr(wish, name) is not None:
            chosen[name] = getattr(wish, name)
    if source.chat_template is not None:
        # Always a file: vLLM would open a text that happens to be the name of one.
        template = folder / "chat_template.jinja"
        template.write_text(source.chat_template)
        chosen["chat_template"] = template
    result = []
    for name, value in chosen.items():
        if value is not None:
            result += _option(name, value, own.names)
    return result


def _option(name: str, value: Any, known: set[str]) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        flag = flag if value else flag.replace("--", "--no-", 1)
        return [flag] if flag in known else []
    if flag not in known:
        return []
    if isinstance(value, list):
        return [flag, *(one if isinstance(one, str) else json.dumps(msgspec.to_builtins(one)) for one in value)]
    return [f"{flag}={value}"]


def reported(args: Namespace, vllm_config: Any) -> dict[str, Any]:
    """The `EngineArguments` of a running instance, for its registration. What has no fit form is left out."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found: dict[str, Any] = {name: getattr(args, name, None) for name in _AS_GIVEN}
    found |= {
        "served_model_name": list(args.served_model_name or [args.model]),
        "dtype": str(model.dtype).removeprefix("torch."),
        "block_size": getattr(vllm_config.cache_config, "block_size", None),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        # Without the second flag vLLM makes no tool parser, whatever the first says.
        "tool_call_parser": getattr(args, "tool_call_parser", None),
        "reasoning_parser": getattr(getattr(args, "structured_outputs_config", None), "reasoning_parser", None),
        "chat_template": _template(getattr(args, "chat_template", None)),
        "lora_modules": [
            {"name": str(module.name), "path": str(module.path)} for module in getattr(args, "lora_modules", None) or []
        ],
    }
    fit: dict[str, Any] = {}
    for name, value in found.items():
        if value in (None, "", [], False):
            continue
        try:
            fit |= msgspec.to_builtins(msgspec.convert({name: value}, EngineArguments))
        except msgspec.ValidationError:
            continue
    return fit


def _template(given: Any) -> str | None:
    if not given:
        return None
    try:
        return Path(given).read_text()
    except (OSError, ValueError):
        # vLLM also takes the template itself.
        return str(given)
