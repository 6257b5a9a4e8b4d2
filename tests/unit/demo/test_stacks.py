"""The instances of the fidelity matrix: what they are started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import stacks
from benchmarks.stacks import STACKS


def _model(folder: Path) -> Path:
    model = folder / "smollm2"
    model.mkdir()
    added = [
        {"id": 6, "content": "<filename>", "special": True},
        {"id": 7, "content": "<gh_stars>", "special": True},
        {"id": 8, "content": "<issue_start>", "special": True},
    ]
    vocabulary = {"<filename>": 6, "<gh_stars>": 7, "<issue_start>": 8, "a": 9}
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    return model


def test_the_model_that_thinks_has_the_tokens_a_reasoning_parser_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "chat_model", lambda: _model(tmp_path))
    copy = Path(STACKS["reasoning"].options(tmp_path).model)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"] == {"<think>": 6, "</think>": 7, "<issue_start>": 8, "a": 9}
    assert [(token["content"], token["special"]) for token in tokenizer["added_tokens"]] == [
        ("<think>", False),
        ("</think>", False),
        ("<issue_start>", True),
    ]
    assert (copy / "model.safetensors").read_text() == "weights"


def test_setups_become_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path)
    monkeypatch.setattr(stacks, "chat_model", lambda: model)
    monkeypatch.setattr(stacks, "lora_adapter", lambda model, seed: f"/adapters/{seed}")
    tools, crowded = STACKS["tools"].options(tmp_path), STACKS["crowded"].options(tmp_path)
    assert tools.arguments[-3:] == ("--lora-modules", "warm=/adapters/1", "cold=/adapters/2")
    assert crowded.max_num_seqs == 6 and crowded.kv_cache_bytes == 24 * 5_898_240
    assert STACKS["plain"].options(tmp_path).model == str(model)
