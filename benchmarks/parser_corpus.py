"""What models write: answers with and without tool calls and reasoning, cut off and whole."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.tool_syntaxes import HERMES, SYNTAXES, Call, Syntax, json_array, json_text

__all__ = ["PAIRS", "REASONING", "TOOLS", "Text", "forced_texts", "paired_texts", "plain_texts", "scrambled_texts"]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "order",
            "parameters": {
                "type": "object",
                "properties": {"items": {"type": "array", "items": {"type": "object"}}, "note": {"type": "string"}},
            },
        },
    },
]

ONE: list[Call] = [("get_weather", {"city": "Paris"})]
TWO: list[Call] = [("get_weather", {"city": "Oslo", "days": 3}), ("get_weather", {"city": "São Paulo"})]
NESTED: list[Call] = [("order", {"items": [{"sku": "a}1", "n": [2]}, {"sku": "b"}], "note": 'say "hi"'})]
UNICODE: list[Call] = [("get_weather", {"city": "東京 🗼"})]


@dataclass(frozen=True)
class Text:
    """One answer. `calls`: the names of the calls that a reader finds in it; `ends`: it is not cut off."""

    name: str
    text: str
    calls: tuple[str, ...] = ()
    reasons: bool = False
    ends: bool = True
    #: The prompt ends inside an open reasoning block.
    reasoning_open: bool = False


#: Reasoning parsers of models that write the usual tags.
_THINK = [
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "deepseek_v41",
    "holo2",
    "ernie45",
    "glm45",
    "glm47",
    "ling3",
    "granite_thinking_parser",
    "kimi_k2",
    "mimo",
    "minimax_m2",
    "minimax_m2_append_think",
    "nemotron_v3",
    "olmo3",
    "qwen3",
    "step3",
    "step3p5",
    "hy_v3",
    "minicpmv",
    "poolside_v1",
]

#: By name of the reasoning parser: how reasoning begins and ends.
REASONING: dict[str, tuple[str, str]] = {
    "granite": ("Here is my thought process:", "Here is my response:"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "inkling": ("<|message_model|><|content_thinking|>", "<|end_message|><|message_model|><|content_text|>"),
    **dict.fromkeys(_THINK, ("<think>", "</think>")),
}

#: (tool parser, reasoning parser) as they are used together.
PAIRS: tuple[tuple[str, str], ...] = (
    *((name, name) for name in sorted(set(SYNTAXES) & set(REASONING))),
    *(("hermes", name) for name in ("qwen3", "deepseek_r1", "deepseek_v3", "granite", "kimi_k2", "olmo3")),
    *((name, "qwen3") for name in ("qwen3_json", "qwen3_coder", "qwen3_xml")),
    ("qwen3_coder", "nemotron_v3"),
    ("qwen3_coder", "granite_thinking_parser"),
    ("granite4", "granite"),
    ("llama3_json", "deepseek_r1"),
    ("llama3_json", "nemotron_v3"),
    ("pythonic", "deepseek_r1"),
    ("deepseek_v3", "deepseek_r1"),
    ("deepseek_v31", "deepseek_v3"),
    ("deepseek_v32", "deepseek_v3"),
    ("glm45", "deepseek_r1"),
    ("minimax_m2", "minimax_m2_append_think"),
    ("longcat", "deepseek_r1"),
)

#: How many scrambled answers are tried for each way to tokenize the markers.
SCRAMBLED = 12

CONTENT = "Is 2 < 3 and [1, 2] {x}? Yes 😀.\n\nDone."
THOUGHT = "Let me see: 2 < 3.\nSo 🤔 fine."


def plain_texts(syntax: Syntax | None) -> list[Text]:
    """Answers of a model that may call tools, without reasoning."""
    foreign = [
        Text("other syntax", HERMES.write(ONE)),
        Text("a JSON array", json_array(ONE, "parameters")),
    ]
    texts = [Text("content", CONTENT), Text("content cut off", CONTENT[:30], ends=False), Text("nothing", "")]
    if syntax is None:
        return texts + foreign
    write = syntax.write
    one, two = write(ONE), write(TWO)
    return [
        Text("two calls", two, ("get_weather", "get_weather")),
        Text("one call", one, ("get_weather",)),
        Text("text, then a call", "I look it up.\n" + one, ("get_weather",)),
        Text("a call, then text", one + "\nThat was it.", ("get_weather",)),
        Text("nested JSON", write(NESTED), ("order",)),
        Text("unicode", write(UNICODE), ("get_weather",)),
        Text("a call cut off", one[: len(one) * 2 // 3], ends=False),
        Text("two calls cut off", "OK. " + two[: len(two) * 4 // 5], ends=False),
        Text("marker cut off", "Well, " + one[:7], ends=False),
        *texts,
        *foreign,
    ]


def forced_texts(syntax: Syntax | None, kind: str, native: bool) -> list[Text]:
    """Answers under `required` or a named tool: in the model's own syntax, or the JSON that vLLM's grammar forces."""
    if native:
        if syntax is None:
            return []
        calls = ONE if kind == "named" else TWO
        text = syntax.write(calls)
        return [
            Text("forced", text, tuple(name for name, _ in calls)),
            Text("forced nested", syntax.write(NESTED), ("order",)),
            # Some grammars allow no line breaks between the parts of a call.
            Text("forced in one line", text.replace("\n", "")),
            Text("forced cut off", text[: len(text) * 3 // 4], ends=False),
        ]
    if kind == "named":
        return [
            Text("forced", json_text(TWO[0][1]), ("get_weather",)),
            Text("forced unicode", json_text(UNICODE[0][1]), ("get_weather",)),
            Text("forced cut off", json_text(TWO[0][1])[:12], ("get_weather",), ends=False),
        ]
    text = json_array([*TWO, *NESTED], "parameters")
    return [
        Text("forced", text, ("get_weather", "get_weather", "order")),
        Text("forced unicode", json_array(UNICODE, "parameters"), ("get_weather",)),
        Text("forced cut off", text[: len(text) * 2 // 3], ends=False),
    ]


def paired_texts(start: str, end: str, answers: list[Text]) -> list[Text]:
    """`answers` after reasoning, which the model opens itself or finds opened by the prompt."""
    texts = [
        Text("reasoning cut off", start + THOUGHT, ends=False),
        Text("reasoning cut off, opened by the prompt", THOUGHT, ends=False, reasoning_open=True),
        Text("end marker cut off", start + THOUGHT + end[:3], ends=False),
        Text("empty reasoning", start + end + CONTENT),
        Text("end marker again in the answer", start + THOUGHT + end + f"The mark {end} ends it.\n{end}" + CONTENT),
        Text("end marker again, cut off", start + THOUGHT + end + f"Well. {end}{end[:5]}", ends=False),
        Text("reasoning again", start + THOUGHT + end + f"One. {start}{THOUGHT}{end} Two.\n" + CONTENT),
        Text("reasoning again, cut off", start + THOUGHT + end + f"One. {start}{THOUGHT}", ends=False),
    ]
    for position, answer in enumerate(answers):
        for opened in (False, True) if position == 0 else (False,):
            text = ("" if opened else start) + THOUGHT + end + ("\n\n" if opened else "") + answer.text
            name = f"reasoning, {answer.name}" + (", opened by the prompt" if opened else "")
            texts.append(Text(name, text, answer.calls, bool(answer.text), answer.ends, opened))
    return [*texts, Text("no reasoning, " + answers[0].name, answers[0].text, ends=answers[0].ends)]


def scrambled_texts(rng: random.Random, markers: list[str], syntax: Syntax | None) -> list[Text]:
    """Markers again, unbalanced and in pieces, anywhere in an answer: what small models write, and nobody would."""
    call = syntax.write(ONE) if syntax else HERMES.write(ONE)
    texts = []
    for number in range(SCRAMBLED):
        parts = []
        for _ in range(rng.randint(3, 7)):
            marker = rng.choice(markers)
            parts.append(
                rng.choice(
                    (
                        marker,
                        marker,
                        marker[: rng.randint(1, len(marker))],
                        marker[rng.randint(0, len(marker) - 1) :],
                        call,
                        call[: rng.randint(1, len(call))],
                        rng.choice((" so", "A.", "\n", "\n\n", " 😀", "<", "{", " [", '"')),
                        THOUGHT,
                    )
                )
            )
        opened = rng.random() < 0.4
        texts.append(Text(f"scrambled {number}", "".join(parts), ends=rng.random() < 0.5, reasoning_open=opened))
    return texts
