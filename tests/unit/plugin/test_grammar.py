"""A grammar behind a reasoning parser: the target's is where the source's is, wherever the request was cut.

Real: vLLM's structured output manager, xgrammar, the reasoning parsers and the tokenizer. Not real: the engine.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.grammar import GrammarReplay, replay_grammar

pytest.importorskip("vllm")
pytest.importorskip("xgrammar")

MODEL = Path(".cache/models/smollm2")
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n", "s"]}'
ANSWER = '{"n": 12, "s": "a b"}'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    assert MODEL.exists(), "the demo model is missing: python -m benchmarks.demo_models"
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> Any:
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False),
        model_config=None,
        speculative_config=None,
    )
    return XgrammarBackend(config, tokenizer=tokenizer, vocab_size=len(tokenizer))


def looking_back(parser: Any) -> Any:
    """The parser without its own `is_reasoning_end_streaming`: vLLM's default looks at the last marker of all."""
    from vllm.reasoning import ReasoningParser

    return type("LookingBack", (parser,), {"is_reasoning_end_streaming": ReasoningParser.is_reasoning_end_streaming})


class Engine:
    """One instance's structured output manager with one request."""

    def __init__(self, tokenizer: Any, backend: Any, reasoner: str, prompt: str) -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        self.manager = StructuredOutputManager.__new__(StructuredOutputManager)
        self.manager.enable_in_reasoning = False
        self.manager.tokenizer = tokenizer
        self.manager.reasoner_cls = None
        if reasoner:
            looks_back = reasoner == "last marker"
            named = ReasoningParserManager.get_reasoning_parser("deepseek_r1" if looks_back else reasoner)
            self.manager.reasoner_cls = looking_back(named) if looks_back else named
        self.grammar = backend.compile_grammar(StructuredOutputOptions.JSON, SCHEMA)
        self.structured = SimpleNamespace(
            grammar=self.grammar, reasoning_ended=None, reasoner=None, reasoning_parser_kwargs=None
        )
        prompt_ids = tokenizer.encode(prompt)
        self.request = SimpleNamespace(
            request_id="r",
            use_structured_output=True,
            structured_output_request=self.structured,
            prompt_token_ids=prompt_ids,
            output_token_ids=[],
            all_token_ids=list(prompt_ids),
        )

    def step(self, token: int) -> bool:
        """What vLLM's scheduler does with a sampled token."""
        self.append([token])
        accepted: bool = self.manager.accept_tokens(self.request, [token])
        return accepted

    def append(self, tokens: list[int]) -> None:
        self.request.output_token_ids.extend(tokens)
        self.request.all_token_ids.extend(tokens)

    def state(self, backend: Any) -> tuple[Any, ...]:
        """Whether reasoning has ended, how much the grammar has taken, and what it allows next."""
        import xgrammar

        mask = xgrammar.allocate_token_bitmask(1, backend.vocab_size)
        self.grammar.fill_bitmask(mask, 0)
        return bool(self.structured.reasoning_ended), self.grammar.num_processed_tokens, mask.tolist()


CASES = {
    "no reasoning parser": ("", "Q: ", ANSWER),
    "the model opens its reasoning": ("deepseek_r1", "Q: ", "<think>Is 2 < 3?</think>" + ANSWER),
    "the prompt has opened it": ("qwen3", "Q: <think>", 'So {"n": 1.</think>' + ANSWER),
    "a marker in the answer": ("qwen3", "Q: ", '<think>x</think>{"n": 1, "s": "<think>"}'),
    "a parser that looks at the last marker": ("last marker", "Q: ", '<think>x</think>{"n": 1, "s": "<think>"}'),
    "step3": ("step3", "Q: <think>", "a</think>" + ANSWER),
}


@pytest.mark.parametrize("case", CASES)
def test_the_target_grammar_stands_where_the_sources_does_at_every_cut(tokenizer: Any, backend: Any, case: str):
    reasoner, prompt, answer = CASES[case]
    tokens = tokenizer.encode(answer)
    source = Engine(tokenizer, backend, reasoner, prompt)
    constrained = 0
    for cut, token in enumerate(tokens, start=1):
        assert source.step(token), f"the source's grammar rejects token {cut}: {tokenizer.decode([token])!r}"
        target = Engine(tokenizer, backend, reasoner, prompt)
        target.append(tokens[:cut])
        assert replay_grammar(target.manager, target.request)
        assert target.state(backend) == source.state(backend), f"cut after token {cut}"
        constrained = source.grammar.num_processed_tokens
    assert constrained > 5, "the grammar has seen nothing: the case proves nothing"


def test_tokens_that_came_before_the_commit_need_not_wait_for_it(tokenizer: Any, backend: Any):
    reasoner, prompt, answer = CASES["the model opens its reasoning"]
    tokens = tokenizer.encode(answer)
    source, target = (Engine(tokenizer, backend, reasoner, prompt) for _ in range(2))
    replay = GrammarReplay(target.request)
    for start in range(0, len(tokens), 4):
        target.append(tokens[start : start + 4])
        assert replay.advance(target.manager) and replay.advance(target.manager)
    assert all(source.step(token) for token in tokens)
    assert target.state(backend) == source.state(backend)


def test_all_tokens_in_one_call_would_not_do(tokenizer: Any, backend: Any):
    reasoner, prompt, answer = CASES["a parser that looks at the last marker"]
    tokens = tokenizer.encode(answer)
    once, one_by_one = (Engine(tokenizer, backend, reasoner, prompt) for _ in range(2))
    once.append(tokens)
    one_by_one.append(tokens)
    assert once.manager.accept_tokens(once.request, tokens)
    assert replay_grammar(one_by_one.manager, one_by_one.request)
    assert once.state(backend) != one_by_one.state(backend)


def test_a_grammar_that_rejects_is_reported(tokenizer: Any, backend: Any):
    target = Engine(tokenizer, backend, "", "Q: ")
    target.append(tokenizer.encode("not JSON"))
    assert not replay_grammar(target.manager, target.request)


def test_a_request_without_structured_output_has_nothing_to_replay():
    assert replay_grammar(None, SimpleNamespace(use_structured_output=False))
