"""What two instances are compared by before a request may move between them, and how bad a difference is.

The one table for the pre-flight check (in the panel) and for the handshake (in the target's engine). An instance
reports its factors as text by name (`vllm_plugin.facts`); this module knows neither vLLM nor Django.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, unquote

from vllm_plugin import topology

__all__ = ["FACTORS", "Check", "Factor", "Level", "adapters_text", "compare", "parse_adapters", "refusal", "warnings"]

Level = Literal["ok", "warning", "error"]
#: equal: the same text. at_least: the target's number is not below the source's. superset: the target has each adapter
#: of the source, with the same content. remapped: blocks can be copied between the two sizes.
Rule = Literal["equal", "at_least", "superset", "remapped"]


@dataclass(frozen=True)
class Check:
    """One compared thing. `remedy` is one sentence about a difference: what to do about it, or, where `level` is "ok",
    what is done about it; else empty."""

    name: str
    source_value: str
    target_value: str
    level: Level
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """What differs, and what to do about it."""
        return (
            f"The factor {self.name} differs (source: {self.source_value}, target: {self.target_value}): {self.remedy}"
        )


@dataclass(frozen=True)
class Factor:
    """`level`: how bad a difference is. An "error" makes a move inexact, impossible, or leaves clients of the source
    without service; with a "warning" single requests may be refused or round differently."""

    name: str
    level: Literal["warning", "error"]
    remedy: str
    rule: Rule = "equal"


FACTORS: tuple[Factor, ...] = (
    Factor("model", "warning", "The names differ though the weights agree; start both from the same model to be sure."),
    Factor("model_config", "error", "Start both instances from the same model, with the same --hf-overrides."),
    Factor("weights", "error", "Start both instances from the same weights, with the same --quantization."),
    Factor("dtype", "error", "Start the target with the same --dtype as the source."),
    Factor("kv_cache_dtype", "error", "Start the target with the same --kv-cache-dtype as the source."),
    Factor("block_size", "error", "Start the target with the same --block-size as the source."),
    Factor("kv_groups", "error", "Both instances must lay out their KV cache alike: same model, same vLLM release."),
    Factor("kv_block_shape", "error", "Both instances need the same KV block shape: same --block-size, same release."),
    Factor("heads", "error", "Start both instances from the same model."),
    Factor("runner", "error", "Both instances must use the same model runner: set VLLM_USE_V2_MODEL_RUNNER alike."),
    Factor("rng", "error", "Seeded requests would go on differently: use the same device type, runner and release."),
    Factor(
        "cpu_isa",
        "error",
        "CPU attention packs keys inside a block by instruction set: run both instances on the same kind of processor.",
    ),
    Factor("tokenizer", "error", "Start both instances with the same tokenizer files."),
    Factor(
        "chat_template",
        "warning",
        "Chat requests that become another prompt on the target are refused one by one; use the same --chat-template.",
    ),
    Factor("tool_parser", "error", "Start the target with the same --tool-call-parser as the source."),
    Factor("reasoning_parser", "error", "Start the target with the same --reasoning-parser as the source."),
    Factor("answer_options", "error", "Start the target with the same of these flags as the source."),
    Factor(
        "scheduling_policy",
        "warning",
        "Priorities count for one of the instances only; use the same --scheduling-policy.",
    ),
    Factor(
        "max_model_len", "error", "Start the target with a --max-model-len that is not below the source's.", "at_least"
    ),
    Factor(
        "tensor_parallel_size",
        "error",
        "Start the target with a --tensor-parallel-size that divides the model's attention heads and KV heads.",
        "remapped",
    ),
    Factor(
        "pipeline_parallel_size",
        "error",
        "Start the target with a --pipeline-parallel-size that is not above the model's layers.",
        "remapped",
    ),
    Factor(
        "vllm_version",
        "warning",
        "Different releases may round differently: outputs can diverge after the move. Use one release.",
    ),
    Factor("protocol_version", "error", "Install the same release of vllm-hi-panel on both instances."),
    Factor(
        "lora",
        "error",
        "Load each adapter of the source on the target too, under the same name and from the same files "
        "(--lora-modules, POST /v1/load_lora_adapter).",
        "superset",
    ),
)

_UNKNOWN = "This release does not know the factor {name}; use the same release of vllm-hi-panel on both instances."


def compare(source: Mapping[str, Any], target: Mapping[str, Any]) -> list[Check]:
    """Compares two instances factor by factor: first those of the table, then unknown ones, which a newer release may
    report. A factor that only one side reports differs; one that neither does is left out."""
    reported = source.keys() | target.keys()
    checks = [_check(factor, source, target) for factor in FACTORS if factor.name in reported]
    for name in sorted(reported - {factor.name for factor in FACTORS}):
        unknown = Factor(name, "warning", _UNKNOWN.format(name=name))
        checks.append(_check(unknown, source, target))
    return checks


def refusal(checks: Iterable[Check]) -> str | None:
    """One sentence about the first difference that forbids a migration; None if there is none."""
    return next((check.sentence for check in checks if check.level == "error"), None)


def warnings(checks: Iterable[Check]) -> list[str]:
    """One sentence for each difference that does not forbid a migration."""
    return [check.sentence for check in checks if check.level == "warning"]


def adapters_text(adapters: Mapping[str, str]) -> str:
    """The factor `lora`: fingerprints of the loaded adapters by name, as text."""
    return ", ".join(f"{quote(name, safe=' /.:@')}={print_}" for name, print_ in sorted(adapters.items())) or "none"


def parse_adapters(text: object) -> dict[str, str]:
    """The inverse of `adapters_text`; what is no such text holds no adapter."""
    pairs = (part.partition("=") for part in str(text or "").split(", "))
    return {unquote(name): print_ for name, sign, print_ in pairs if sign}


def _check(factor: Factor, source: Mapping[str, Any], target: Mapping[str, Any]) -> Check:
    left, right = source.get(factor.name), target.get(factor.name)
    if left == right or _fits(factor.rule, left, right):
        return Check(factor.name, _show(left), _show(right), "ok")
    if factor.rule == "remapped" and topology.can_run(source) and topology.can_run(target):
        words = topology.in_words(source, target, factor.name)
        return Check(factor.name, _show(left), _show(right), "ok", words)
    return Check(factor.name, _show(left), _show(right), factor.level, factor.remedy)


def _fits(rule: Rule, source: object, target: object) -> bool:
    if rule == "at_least":
        return _at_least(target, source)
    if rule == "superset":
        return parse_adapters(source).items() <= parse_adapters(target).items()
    return False


def _at_least(value: object, least: object) -> bool:
    """Compares two numbers, which instances send as text."""
    try:
        return float(str(value)) >= float(str(least))
    except ValueError:
        return False


def _show(value: object) -> str:
    return "—" if value is None else str(value)
