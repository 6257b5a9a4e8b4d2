"""Drives vLLM's streaming parsers with written answers, token by token and in groups."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.parser_corpus import REASONING, TOOLS, Text, forced_texts, paired_texts, plain_texts, scrambled_texts
from benchmarks.tool_syntaxes import SYNTAXES
from vllm_plugin.parsers import Kind

__all__ = ["KINDS", "SEED", "TOKENIZER", "Bench", "Verdict", "groupings"]

TOKENIZER = Path(".cache/models/smollm2")
KINDS: tuple[Kind, ...] = ("none", "auto", "required", "named")
SEED = 20260101
RANDOM_GROUPINGS = 6
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
#: How the markers of a syntax are tokenized: in pieces, as single tokens, as single special tokens.
TOKENIZERS = ("pieces", "tokens", "special")
#: What a request may tell the chat template, and by that the parser.
TEMPLATES: tuple[dict[str, Any], ...] = (
    {},
    {"thinking": True, "enable_thinking": True},
    {"thinking": False, "enable_thinking": False, "force_nonempty_content": True},
)


@dataclass(frozen=True)
class Result:
    """What a client puts together from the deltas of one answer."""

    content: str
    reasoning: str
    calls: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...]
    finish_reason: str
    #: Of the usage that instances with a reasoning parser report.
    reasoning_tokens: int
    error: str


@dataclass
class Verdict:
    """What was found out about one pair of parsers under one tool choice."""

    tool: str
    reasoning: str
    kind: Kind
    tried: int = 0
    texts: set[str] = field(default_factory=set)
    #: The end of the answer comes in a later delta than the replay.
    counterexample: str = ""
    #: It comes in the same delta.
    at_the_end: str = ""
    #: Only the number of reasoning tokens in the usage differs.
    count: str = ""
    skipped: str = ""
    exercised: bool = False

    @property
    def invariant(self) -> bool:
        return self.movable and not self.at_the_end

    @property
    def movable(self) -> bool:
        """Whether an answer can be repeated from all its tokens at once, if its end comes in a later delta."""
        return self.exercised and not self.counterexample and not self.skipped

    @property
    def outcome(self) -> str:
        if self.skipped:
            return f"not tried: {self.skipped}"
        if self.counterexample:
            return f"differs: {self.counterexample}"
        if not self.exercised:
            return "not proved: no text of the corpus is in its syntax"
        but = f", but for the usage: {self.count}" if self.count else ""
        if self.at_the_end:
            return f"differs only if the answer ends in the same delta: {self.at_the_end}{but}"
        return f"invariant{but}"


def groupings(tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Sizes of the groups: the first k at once for every k, some at random, and all at once. The last group, which
    tells the end, has one token in all but the last grouping."""
    for first in range(2, tokens):
        yield [first] + [1] * (tokens - first)
    for _ in range(RANDOM_GROUPINGS if tokens > 3 else 0):
        sizes: list[int] = []
        while (left := tokens - 1 - sum(sizes)) > 0:
            sizes.append(min(left, rng.choice((1, 1, 2, 3, 5, 8))))
        yield [*sizes, 1]
    if tokens > 1:
        yield [tokens]


class Bench:
    """Makes tokenizers, requests and parsers, and runs answers through them."""

    def __init__(self, tokenizer: Path = TOKENIZER) -> None:
        from transformers import AutoTokenizer

        logging.getLogger("vllm").setLevel(logging.CRITICAL + 1)
        self._path = tokenizer
        self._load = AutoTokenizer.from_pretrained
        self._tokenizers: dict[tuple[str, tuple[str, ...]], Any] = {}

    def tokenizer(self, mode: str, markers: tuple[str, ...]) -> Any:
        from tokenizers import AddedToken
        from vllm.tokenizers.hf import get_cached_tokenizer

        key = (mode, markers if mode != "pieces" else ())
        if key not in self._tokenizers:
            tokenizer = self._load(str(self._path))
            added = [AddedToken(text, normalized=False, special=mode == "special") for text in key[1]]
            tokenizer.add_tokens(added, special_tokens=mode == "special")
            self._tokenizers[key] = get_cached_tokenizer(tokenizer)
        return self._tokenizers[key]

    def verdict(self, tool: str, reasoning: str, kind: Kind, modes: Iterable[str] = TOKENIZERS) -> Verdict:
        """Tries one pair of parsers ("" for none) with each way to tokenize the markers."""
        verdict = Verdict(tool, reasoning, kind)
        errors = []
        for mode in modes:
            try:
                self._try(verdict, mode)
            except _CannotBuild as error:
                errors.append(str(error))
            if verdict.counterexample:
                break
        if not verdict.tried:
            verdict.skipped = errors[0] if errors else "no text for this tool choice"
        return verdict

    def _try(self, verdict: Verdict, mode: str) -> None:
        syntax = SYNTAXES.get(verdict.tool)
        start, end = REASONING.get(verdict.reasoning, ("<think>", "</think>"))
        markers = (*(syntax.markers if syntax else ()), *((start.strip(), end.strip()) if verdict.reasoning else ()))
        if mode != "pieces" and not markers:
            return
        tokenizer = self.tokenizer(mode, tuple(dict.fromkeys(markers)))
        parser_class = self._parser_class(tokenizer, verdict.tool, verdict.reasoning)
        tool_class = parser_class.tool_parser_cls
        native = tool_class is not None and not tool_class.supports_required_and_named
        if not verdict.tool:
            texts = [Text("content", "Is 2 < 3? Yes 😀.\n\nDone."), Text("cut off", "Is 2 < 3", ends=False)]
        elif verdict.kind in ("none", "auto"):
            texts = plain_texts(syntax)
            if verdict.reasoning and syntax is not None:
                texts = [*texts[:1], *texts[2:4], texts[6]]
        else:
            texts = forced_texts(syntax, verdict.kind, native)
        if verdict.reasoning:
            texts = paired_texts(start, end, texts)
        free = verdict.kind in ("none", "auto") or not self._grammar_forces(parser_class, tokenizer, verdict.kind)
        if free and verdict.kind not in ("none", "auto") and not verdict.reasoning:
            texts += plain_texts(syntax)
        if free:
            rng = random.Random(f"{SEED} {verdict.tool} {verdict.reasoning} {mode}")
            scrambled = scrambled_texts(rng, [marker for marker in (*markers, start, end) if marker], syntax)
            texts += scrambled if verdict.reasoning else [replace(text, reasoning_open=False) for text in scrambled]
        # The parsers of the older kind do not look at what the template is told.
        follows = verdict.reasoning or (tool_class is not None and tool_class.engine_based_streaming)
        for template in TEMPLATES if mode == "tokens" and follows else TEMPLATES[:1]:
            try:
                parser_class(tokenizer, TOOLS, chat_template_kwargs=template)
            except Exception:  # Some look for their markers only where the template lets the model think.
                continue
            for text in texts:
                self._try_text(verdict, parser_class, tokenizer, (mode, template), text, start)
                if verdict.counterexample:
                    return
        if verdict.kind == "none" and verdict.tool:
            # A chat that offers no tools comes by the same parser.
            self._try_text(verdict, parser_class, tokenizer, (mode, {}), texts[0], start, tools=False)

    def _parser_class(self, tokenizer: Any, tool: str, reasoning: str) -> Any:
        from vllm.parser.parser_manager import ParserManager

        try:
            return ParserManager.get_parser(
                tool_parser_name=tool or None,
                reasoning_parser_name=reasoning or None,
                enable_auto_tools=bool(tool),
                model_name="model",
                tokenizer=tokenizer,
            )
        except Exception as error:  # Whatever a parser raises: it cannot be had with this tokenizer.
            raise _CannotBuild(str(error).rsplit("'model': ", 1)[-1].splitlines()[0]) from error

    def _try_text(
        self,
        verdict: Verdict,
        parser_class: Any,
        tokenizer: Any,
        how: tuple[str, dict[str, Any]],
        text: Text,
        start: str,
        tools: bool = True,
    ) -> None:
        mode, template = how
        request = self.request(verdict.kind, tools and bool(verdict.tool))
        parser_class(tokenizer, request.tools, chat_template_kwargs=template).adjust_request(request)
        prompt = PROMPT + (start if text.reasoning_open else "")
        pieces = self._pieces(tokenizer, request, prompt, text)
        prompt_ids = tokenizer.encode(prompt)

        def run(sizes: list[int]) -> Result:
            parser = parser_class(tokenizer, request.tools, chat_template_kwargs=template, model_config=None)
            return _run(parser, request, prompt_ids, pieces, sizes, "stop" if text.ends else "length")

        singles = [1] * len(pieces)
        expected = run(singles)
        # Ids that are made up differ from run to run; those that are read from the text must not.
        keep_ids = [call[2] for call in run(singles).calls] == [call[2] for call in expected.calls]
        verdict.texts.add(text.name)
        verdict.tried += 1
        if text.calls and verdict.kind != "none" and verdict.tool:
            found = tuple(name for call in expected.calls for name in call[0])
            verdict.exercised |= found == text.calls and (bool(expected.reasoning) or not verdict.reasoning)
        elif verdict.kind == "none" and verdict.reasoning:
            verdict.exercised |= text.reasons and bool(expected.reasoning) and bool(expected.content)
        elif verdict.kind == "none":
            verdict.exercised |= bool(expected.content)
        rng = random.Random(f"{SEED} {verdict.tool} {verdict.reasoning} {verdict.kind} {mode} {text.name}")
        for sizes in groupings(len(pieces), rng):
            verdict.tried += 1
            got = run(sizes)
            if _comparable(got, keep_ids) == _comparable(expected, keep_ids):
                continue
            example = f"{text.name} ({mode}), {_sizes(sizes)}: {_difference(expected, got)}"
            if _comparable(replace(got, reasoning_tokens=expected.reasoning_tokens), keep_ids) == _comparable(
                expected, keep_ids
            ):
                verdict.count = verdict.count or example
            elif len(sizes) > 1:
                verdict.counterexample = example
                return
            else:
                verdict.at_the_end = verdict.at_the_end or example

    def _grammar_forces(self, parser_class: Any, tokenizer: Any, kind: Kind) -> bool:
        """Whether vLLM lets the model write nothing but calls under this tool choice."""
        import xgrammar

        request = self.request(kind, True)
        parser_class(tokenizer, request.tools, chat_template_kwargs={}).adjust_request(request)
        outputs = request.structured_outputs
        if outputs is None:
            return False
        compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([]))
        if outputs.structural_tag is not None:
            grammar = compiler.compile_structural_tag(outputs.structural_tag)
        else:
            grammar = compiler.compile_json_schema(json.dumps(outputs.json))
        return not xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True).accept_string("Hello")

    def request(self, kind: Kind, tools: bool) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        if tools:
            named = {"type": "function", "function": {"name": "get_weather"}}
            body |= {"tools": TOOLS, "tool_choice": named if kind == "named" else kind}
        return ChatCompletionRequest.model_validate(body)

    def _pieces(self, tokenizer: Any, request: Any, prompt: str, text: Text) -> list[tuple[str, list[int]]]:
        """Returns (new text, token ids) of each step, as the engine's detokenizer gives them to the serving layer."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        params = SamplingParams(skip_special_tokens=request.skip_special_tokens)
        made: Any = SimpleNamespace(
            request_id="r", sampling_params=params, prompt_token_ids=tokenizer.encode(prompt), prompt_embeds=None
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, made)
        ids = tokenizer.encode(text.text)
        last = len(ids) - 1
        pieces = []
        for position, token in enumerate(ids):
            detokenizer.update([token], False)
            finished = position == last and not text.ends
            pieces.append((detokenizer.get_next_output_text(finished, True), [token]))
        if text.ends:
            pieces.append((detokenizer.get_next_output_text(True, True), [tokenizer.eos_token_id]))
        return pieces


class _CannotBuild(Exception):
    """The parser needs what this tokenizer or this installation does not have."""


def _run(
    parser: Any, request: Any, prompt_ids: list[int], pieces: list[tuple[str, list[int]]], sizes: list[int], finish: str
) -> Result:
    content, reasoning, reasoning_tokens, error = "", "", 0, ""
    calls: dict[int, list[Any]] = {}
    at = 0
    try:
        for size in sizes:
            group, at = pieces[at : at + size], at + size
            delta = parser.parse_delta(
                delta_text="".join(text for text, _ in group),
                delta_token_ids=[token for _, tokens in group for token in tokens],
                request=request,
                prompt_token_ids=prompt_ids,
                finished=at >= len(pieces),
            )
            if delta is None:
                continue
            content += delta.content or ""
            reasoning += delta.reasoning or ""
            for call in delta.tool_calls or ():
                names, arguments, ids = calls.setdefault(call.index, [(), "", ()])
                function = call.function
                if function is not None and function.name:
                    names = (*names, function.name)
                if function is not None and function.arguments:
                    arguments += function.arguments
                calls[call.index] = [names, arguments, (*ids, call.id) if call.id else ids]
        reasoning_tokens = parser.count_reasoning_tokens(tuple(token for _, tokens in pieces for token in tokens))
    except Exception as failure:  # The serving layer makes an error event of it.
        error = type(failure).__name__
    if calls and request.tool_choice not in (None, "none") and isinstance(request.tool_choice, str):
        finish = "tool_calls" if finish == "stop" else finish
    return Result(content, reasoning, tuple(tuple(calls[i]) for i in sorted(calls)), finish, reasoning_tokens, error)


def _comparable(result: Result, keep_ids: bool) -> Any:
    calls = tuple((names, arguments, ids if keep_ids else len(ids)) for names, arguments, ids in result.calls)
    return replace(result, calls=calls)  # type: ignore[arg-type]


def _sizes(sizes: list[int]) -> str:
    if len(sizes) == 1:
        return "all at once"
    return f"first {sizes[0]} of {sum(sizes)} at once" if set(sizes[1:]) == {1} else "random groups"


def _difference(expected: Result, got: Result) -> str:
    for name in ("error", "content", "reasoning", "finish_reason", "reasoning_tokens"):
        one, other = getattr(expected, name), getattr(got, name)
        if one != other:
            return f"{name} {_short(other)} instead of {_short(one)}"
    return f"calls {_short([c[:2] for c in got.calls])} instead of {_short([c[:2] for c in expected.calls])}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 90 else text[:60] + " … " + text[-25:]
