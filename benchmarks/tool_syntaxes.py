"""How models write tool calls: the syntax of each of vLLM's tool parsers, by its name."""

# ruff: noqa: RUF001  The fullwidth bars are what these models write.

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["HERMES", "SYNTAXES", "Call", "Syntax", "json_array", "json_text"]

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Syntax:
    """How a model writes calls. `markers`: what real tokenizers of these models have as single tokens."""

    write: Callable[[list[Call]], str]
    markers: tuple[str, ...] = ()


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def _object(call: Call, arguments: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{arguments}": {json_text(call[1])}}}'


def json_array(calls: list[Call], arguments: str = "arguments") -> str:
    return "[" + ", ".join(_object(call, arguments) for call in calls) + "]"


def _tagged(start: str, end: str, arguments: str = "arguments", newline: str = "\n") -> Callable[[list[Call]], str]:
    return lambda calls: "\n".join(f"{start}{newline}{_object(call, arguments)}{newline}{end}" for call in calls)


def _wrapped(start: str, end: str) -> Callable[[list[Call]], str]:
    return lambda calls: start + json_array(calls) + end


def _qwen_xml(start: str, end: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        def one(call: Call) -> str:
            parts = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in call[1].items())
            return f"{start}\n<function={call[0]}>\n{parts}</function>\n{end}"

        return "\n".join(one(call) for call in calls)

    return write


def _invokes(start: str, end: str, tag: str = "", string: bool = False) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        def parameter(key: str, value: Any) -> str:
            kind = f' string="{json_text(isinstance(value, str))}"' if string else ""
            return f'<{tag}parameter name="{key}"{kind}>{_plain(value)}</{tag}parameter>\n'

        body = "".join(
            f'<{tag}invoke name="{name}">\n{"".join(parameter(*item) for item in values.items())}</{tag}invoke>\n'
            for name, values in calls
        )
        return f"{start}\n{body}{end}"

    return write


def _pythonic(start: str, end: str, separator: str = ", ", brackets: str = "[]") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        body = separator.join(f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})" for name, values in calls)
        return f"{start}{brackets[:1]}{body}{brackets[1:]}{end}"

    return write


def _glm(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        parts = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in call[1].items())
        return f"<tool_call>{call[0]}\n{parts}</tool_call>"

    return "\n".join(one(call) for call in calls)


def _deepseek(fenced: bool) -> Callable[[list[Call]], str]:
    def one(call: Call) -> str:
        if fenced:
            inner = f"function<｜tool▁sep｜>{call[0]}\n```json\n{json_text(call[1])}\n```"
        else:
            inner = f"{call[0]}<｜tool▁sep｜>{json_text(call[1])}"
        return f"<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>"

    return lambda calls: "<｜tool▁calls▁begin｜>" + "\n".join(map(one, calls)) + "<｜tool▁calls▁end｜>"


def _kimi(calls: list[Call]) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json_text(values)}<|tool_call_end|>"
        for i, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _step3(calls: list[Call]) -> str:
    body = "".join(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        + "".join(f'<steptml:parameter name="{k}">{_plain(v)}</steptml:parameter>' for k, v in values.items())
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, values in calls
    )
    return f"<｜tool_calls_begin｜>{body}<｜tool_calls_end｜>"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json_text(values)}" for name, values in calls)


def _gemma(start: str, end: str, quote: str) -> Callable[[list[Call]], str]:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return f"{quote}{item}{quote}"
        if isinstance(item, list):
            return "[" + ",".join(map(value, item)) + "]"
        return "{" + _pairs(item) + "}" if isinstance(item, dict) else json_text(item)

    def _pairs(values: dict[str, Any]) -> str:
        return ",".join(f"{k}:{value(v)}" for k, v in values.items())

    return lambda calls: "".join(f"{start}call:{name}{{{_pairs(values)}}}{end}" for name, values in calls)


def _inkling(calls: list[Call]) -> str:
    return "".join(
        f"<|message_model|><|content_invoke_tool_json|>{_object(call, 'args')}<|end_message|>" for call in calls
    )


HERMES = Syntax(_tagged("<tool_call>", "</tool_call>"), ("<tool_call>", "</tool_call>"))
QWEN_XML = Syntax(_qwen_xml("<tool_call>", "</tool_call>"), ("<tool_call>", "</tool_call>"))
GLM = Syntax(_glm, ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
LLAMA_JSON = Syntax(lambda calls: "; ".join(_object(call, "parameters") for call in calls), ("<|python_tag|>",))
DEEPSEEK_MARKERS: tuple[str, ...] = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
DEEPSEEK_MARKERS += ("<｜tool▁sep｜>",)
KIMI_MARKERS: tuple[str, ...] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
KIMI_MARKERS += ("<|tool_call_end|>", "<|tool_call_argument_begin|>")
INKLING_MARKERS: tuple[str, ...] = (
    "<|message_model|>",
    "<|content_text|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
)
INKLING_MARKERS += ("<|content_invoke_tool_text|>", "<|content_tool_error|>", "<|content_model_end_sampling|>")
INKLING_MARKERS += ("<|end_message|>",)
DSML = "｜DSML｜"

#: By name of the tool parser. A parser that is not here is tried with the others' syntaxes only, and proves nothing.
SYNTAXES: dict[str, Syntax] = {
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "granite4": HERMES,
    "ernie45": Syntax(HERMES.write, (*HERMES.markers, "<think>", "</think>", "<response>", "</response>", "<0x0A>")),
    "longcat": Syntax(
        _tagged("<longcat_tool_call>", "</longcat_tool_call>"), ("<longcat_tool_call>", "</longcat_tool_call>")
    ),
    "qwen3_coder": QWEN_XML,
    "qwen3_xml": QWEN_XML,
    "mimo": QWEN_XML,
    "step3p5": QWEN_XML,
    "seed_oss": Syntax(_qwen_xml("<seed:tool_call>", "</seed:tool_call>"), ("<seed:tool_call>", "</seed:tool_call>")),
    "glm45": GLM,
    "glm47": GLM,
    "ling3": GLM,
    "poolside_v1": GLM,
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "pythonic": Syntax(_pythonic("", "")),
    "llama4_pythonic": Syntax(_pythonic("<|python_start|>", "<|python_end|>"), ("<|python_start|>", "<|python_end|>")),
    "olmo3": Syntax(_pythonic("<function_calls>", "</function_calls>", "\n", "")),
    "lfm2": Syntax(_pythonic("<|tool_call_start|>", "<|tool_call_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")),
    "mistral": Syntax(_mistral, ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")),
    "deepseek_v3": Syntax(_deepseek(True), DEEPSEEK_MARKERS),
    "deepseek_v31": Syntax(_deepseek(False), DEEPSEEK_MARKERS),
    "deepseek_v32": Syntax(_invokes(f"<{DSML}function_calls>", f"</{DSML}function_calls>", DSML, True), (DSML,)),
    "deepseek_v4": Syntax(_invokes(f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", DSML, True), (DSML,)),
    "deepseek_v41": Syntax(_invokes(f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", DSML, True), (DSML,)),
    "kimi_k2": Syntax(_kimi, KIMI_MARKERS),
    "minimax_m2": Syntax(
        _invokes("<minimax:tool_call>", "</minimax:tool_call>"), ("<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "dots": Syntax(_invokes("<dots_function_call>", "</dots_function_call>")),
    "granite": Syntax(_wrapped("<|tool_call|>", ""), ("<|tool_call|>",)),
    "granite-20b-fc": Syntax(lambda calls: "".join(f"<function_call> {_object(call)}" for call in calls)),
    "internlm": Syntax(
        _tagged("<|action_start|><|plugin|>", "<|action_end|>", "parameters"),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "jamba": Syntax(_wrapped("<tool_calls>", "</tool_calls>"), ("<tool_calls>", "</tool_calls>")),
    "hunyuan_a13b": Syntax(_wrapped("<tool_calls>", "</tool_calls>")),
    "phi4_mini_json": Syntax(_wrapped("functools", "")),
    "xlam": Syntax(json_array),
    "step3": Syntax(
        _step3,
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_call_end｜>",
            "<｜tool_sep｜>",
        ),
    ),
    "functiongemma": Syntax(
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": Syntax(
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "apertus": Syntax(
        lambda calls: "<|tools_prefix|>" + json_text([{name: values} for name, values in calls]) + "<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "gigachat3": Syntax(
        lambda calls: "".join(f"function call<|role_sep|>\n{_object(call)}" for call in calls), ("<|role_sep|>",)
    ),
    "inkling": Syntax(_inkling, INKLING_MARKERS),
}
