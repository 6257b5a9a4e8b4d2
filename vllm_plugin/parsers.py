"""Which of vLLM's streaming parsers say the same however the tokens of an answer are grouped into deltas.

After a handover the target's front end gets everything generated so far as one delta. What its parser makes of that
must be what the source's parser made of the same tokens one by one, or the client's half of the answer and ours do not
fit together. `python -m benchmarks.parsers` drives vLLM's own parsers through every cut and writes `docs/parsers.md`;
`INVARIANT` is what it proved. Answers that are not streamed are parsed from their whole text and need none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["INVARIANT", "Kind", "chunk_invariant", "parser_names", "tool_choice_kind"]

Kind = Literal["none", "auto", "required", "named"]

#: Name of a parser that nobody told us about.
UNKNOWN = "unknown"

_ALL: frozenset[Kind] = frozenset({"none", "auto", "required", "named"})
_FORCED: frozenset[Kind] = _ALL - {"auto"}
_PLAIN: frozenset[Kind] = frozenset({"none"})

#: (tool parser, reasoning parser) → kinds of tool choice. An instance without parsers passes text through.
INVARIANT: Mapping[tuple[str, str], frozenset[Kind]] = {
    ("apertus", ""): _FORCED,
    ("ernie45", ""): _FORCED,
    ("functiongemma", ""): _FORCED,
    ("gigachat3", ""): _FORCED,
    ("glm45", ""): _FORCED,
    ("glm47", ""): _FORCED,
    ("granite-20b-fc", ""): _FORCED,
    ("granite4", ""): _FORCED,
    ("hermes", ""): _FORCED,
    ("hunyuan_a13b", ""): _FORCED,
    ("internlm", ""): _FORCED,
    ("jamba", ""): _FORCED,
    ("lfm2", ""): _FORCED,
    ("ling3", ""): _FORCED,
    ("llama4_pythonic", ""): _FORCED,
    ("longcat", ""): _FORCED,
    ("mimo", ""): _FORCED,
    ("minicpm5", ""): _FORCED,
    ("minimax_m2", ""): _FORCED,
    ("olmo3", ""): _FORCED,
    ("phi4_mini_json", ""): _FORCED,
    ("pythonic", ""): _FORCED,
    ("qwen3_coder", ""): _FORCED,
    ("qwen3_json", ""): _FORCED,
    ("qwen3_xml", ""): _FORCED,
    ("step3", ""): _FORCED,
    ("step3p5", ""): _FORCED,
    ("xlam", ""): _FORCED,
    ("deepseek_v32", ""): _ALL,
    ("deepseek_v4", ""): _ALL,
    ("dots", ""): _ALL,
    ("kimi_k2", ""): _ALL,
    ("poolside_v1", ""): _ALL,
    ("deepseek_v3", ""): _PLAIN,
    ("deepseek_v31", ""): _PLAIN,
    ("llama3_json", ""): _PLAIN,
    ("llama4_json", ""): _PLAIN,
    ("granite", ""): frozenset({"none", "named"}),
    ("seed_oss", ""): frozenset({"none", "named"}),
}


def chunk_invariant(tool_parser: str, reasoning_parser: str, kind: Kind) -> bool:
    """Whether a streamed answer can be repeated from all its tokens at once.

    Args:
        tool_parser: name given to `--tool-call-parser`, "" for none.
        reasoning_parser: name given to `--reasoning-parser`, "" for none.
        kind: the request's tool choice; "none" also when it offers no tools.
    """
    if not tool_parser and not reasoning_parser:
        return True
    return kind in INVARIANT.get((tool_parser, reasoning_parser), frozenset())


def tool_choice_kind(body: Mapping[str, Any]) -> Kind:
    """Returns the tool choice of a request's body (chat completions, responses or Anthropic messages)."""
    if not body.get("tools"):
        return "none"
    choice = body.get("tool_choice")
    name = choice.get("type") if isinstance(choice, Mapping) else choice
    if name in ("none", "required"):
        return "none" if name == "none" else "required"
    if name == "any":
        return "required"
    if name is None or name == "auto":
        return "auto"
    return "named"


def parser_names(factors: Mapping[str, str], vllm_config: Any) -> tuple[str, str]:
    """Returns the names of an instance's (tool parser, reasoning parser), "" for none.

    Args:
        factors: of the instance, with what its front end has told (`vllm_plugin.front_end`).
        vllm_config: of its engine.
    """
    given = [factors.get(name, UNKNOWN) for name in ("tool_parser", "reasoning_parser")]
    tool, reasoning = ("" if name == "none" else name for name in given)
    if (tool or reasoning) and vllm_config.model_config.hf_config.model_type == "gpt_oss":
        return UNKNOWN, UNKNOWN  # vLLM takes one of its own for these models, whatever the names say.
    return tool, reasoning
