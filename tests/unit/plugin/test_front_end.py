"""The facts that only the API server knows: same content, same fingerprint; other content, another one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from vllm_plugin.facts import front_end_factors
from vllm_plugin.front_end import FrontEnd, adapter_fingerprint, tokenizer_fingerprint

ARGS = argparse.Namespace(
    tool_call_parser="hermes",
    enable_auto_tool_choice=True,
    structured_outputs_config=SimpleNamespace(reasoning_parser=""),
    chat_template=None,
    default_chat_template_kwargs=None,
)


def tokenizer(**words: int) -> Any:
    return SimpleNamespace(backend_tokenizer=Tokenizer(models.WordLevel(words or {"a": 0, "b": 1}, "a")))


def adapter(folder: Path, weights: bytes = b"weights", config: str = "{}") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def front_end(args: argparse.Namespace = ARGS, **loaded: str) -> tuple[FrontEnd, dict[str, Any]]:
    requests = {name: SimpleNamespace(lora_path=path) for name, path in loaded.items()}
    state = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests=requests))
    return FrontEnd(SimpleNamespace(tokenizer=tokenizer()), state, args), requests


def test_tokenizers_are_compared_by_content() -> None:
    same = tokenizer_fingerprint(tokenizer())
    assert same == tokenizer_fingerprint(tokenizer(a=0, b=1))
    assert same != tokenizer_fingerprint(tokenizer(a=1, b=0))
    # The same vocabulary, but the tokens become another text.
    decoding = tokenizer()
    decoding.backend_tokenizer.decoder = decoders.WordPiece("##")
    assert same != tokenizer_fingerprint(decoding)
    # What a caller sets for a batch of its own says nothing.
    batching = tokenizer()
    batching.backend_tokenizer.enable_truncation(7)
    batching.backend_tokenizer.enable_padding(length=9)
    assert same == tokenizer_fingerprint(batching)


def test_a_tokenizer_without_a_backend_is_its_vocabulary() -> None:
    one, other = ({"a": 0, "b": 1}, {"b": 1, "a": 0})
    assert tokenizer_fingerprint(SimpleNamespace(get_vocab=lambda: one)) == tokenizer_fingerprint(
        SimpleNamespace(get_vocab=lambda: other)
    )
    assert tokenizer_fingerprint(None) == "none"


def test_adapters_are_compared_by_content(tmp_path: Path) -> None:
    same = adapter_fingerprint(adapter(tmp_path / "one"))
    assert same == adapter_fingerprint(adapter(tmp_path / "copy"))
    (tmp_path / "one" / "README.md").write_text("says nothing about the weights")
    assert same == adapter_fingerprint(str(tmp_path / "one"))
    assert same != adapter_fingerprint(adapter(tmp_path / "other", b"others"))
    assert same != adapter_fingerprint(adapter(tmp_path / "scaled", config='{"lora_alpha": 32}'))


def test_an_adapter_that_cannot_be_read_equals_no_other(tmp_path: Path) -> None:
    assert adapter_fingerprint(str(tmp_path)) != adapter_fingerprint(str(tmp_path))
    assert adapter_fingerprint("org/adapter") == adapter_fingerprint("org/adapter") != adapter_fingerprint("org/b")


async def test_adapters_follow_what_is_loaded_and_are_read_once(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one")
    facts, loaded = front_end(fr=one)
    first = (await facts.facts())["adapters"]
    # Files that are changed on disk are not what the engine has loaded ...
    adapter(tmp_path / "one", b"others")
    assert (await facts.facts())["adapters"] == first == {"fr": first["fr"]}
    # ... until it loads them anew, under the same name.
    loaded["fr"] = SimpleNamespace(lora_path=one)
    assert (await facts.facts())["adapters"]["fr"] == adapter_fingerprint(one) != first["fr"]
    loaded["de"] = SimpleNamespace(lora_path=adapter(tmp_path / "two"))
    del loaded["fr"]
    assert (await facts.facts())["adapters"] == {"de": first["fr"]}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("tool_parser", {"tool_call_parser": "mistral"}),
        ("tool_parser", {"enable_auto_tool_choice": False}),
        ("tool_parser", {"tool_parser_plugin": "ours.py"}),
        ("reasoning_parser", {"structured_outputs_config": SimpleNamespace(reasoning_parser="qwen3")}),
        ("answer_options", {"enable_prompt_tokens_details": True}),
        ("answer_options", {"return_tokens_as_token_ids": True}),
        ("chat_template", {"chat_template": "{{ messages }}"}),
        ("chat_template", {"default_chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
async def test_what_changes_answers_is_a_factor(name: str, changed: dict[str, Any]) -> None:
    plain = front_end_factors(await front_end()[0].facts())
    other = front_end_factors(await front_end(argparse.Namespace(**vars(ARGS) | changed))[0].facts())
    assert {key for key in plain if plain[key] != other[key]} == {name}
    assert plain["lora"] == "none"
    assert json.loads(json.dumps(plain)) == plain


async def test_a_reasoning_parser_whose_count_is_always_told_is_another_one() -> None:
    qwen = {"structured_outputs_config": SimpleNamespace(reasoning_parser="qwen3")}
    told = argparse.Namespace(**vars(ARGS) | qwen, enable_force_include_usage=True)
    assert (await front_end(told)[0].facts())["reasoning_parser"] == "qwen3 with usage"
    silent = argparse.Namespace(**vars(ARGS), enable_force_include_usage=True)
    assert (await front_end(silent)[0].facts())["reasoning_parser"] == "none"


async def test_a_tool_parser_that_reads_other_answers_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    assert (await front_end()[0].facts())["tool_parser"] == "hermes without strict calls"


async def test_a_template_counts_by_content_not_by_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    given = argparse.Namespace(**vars(ARGS) | {"chat_template": str(tmp_path / "a.jinja")})
    inline = argparse.Namespace(**vars(ARGS) | {"chat_template": "{{ messages }}"})
    assert await front_end(given)[0].facts() == await front_end(inline)[0].facts()
