from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_plugin.engine_arguments import EngineArguments, Instantiate, OwnArguments, options, reported


def own(*arguments: str) -> OwnArguments:
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    return OwnArguments(parser.parse_args(["some/model", *arguments]), parser)


def wish(source: dict[str, Any] | None = None, **wishes: Any) -> Instantiate:
    return msgspec.convert({"job": "j", "attempt": 1, "engine_args": source or {}, **wishes}, Instantiate)


def parsed(*given: str, source: dict[str, Any] | None = None, folder: Path, **wishes: Any) -> argparse.Namespace:
    """What vLLM makes of the standby's own arguments and the appended ones."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    return parser.parse_args(["some/model", *given, *options(wish(source, **wishes), own(*given), folder)])


def test_nothing_wished_changes_nothing(tmp_path: Path):
    assert options(wish(), own("--dtype", "float32"), tmp_path) == []


def test_wishes_win_over_what_it_was_started_with(tmp_path: Path):
    args = parsed(
        "-tp", "4", "--gpu-memory-utilization=0.95",
        folder=tmp_path, tensor_parallel_size=2, pipeline_parallel_size=3, gpu_memory_utilization=0.5,
    )  # fmt: skip
    assert (args.tensor_parallel_size, args.pipeline_parallel_size, args.gpu_memory_utilization) == (2, 3, 0.5)


def test_what_must_agree_is_the_sources(tmp_path: Path):
    source = {
        "dtype": "float32",
        "kv_cache_dtype": "fp8",
        "block_size": 64,
        "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True,
        "reasoning_parser": "qwen3",
        "served_model_name": ["a", "b"],
        "enable_prompt_tokens_details": True,
    }
    args = parsed("--dtype", "bfloat16", "--served-model-name", "c", source=source, folder=tmp_path)
    assert (args.dtype, args.kv_cache_dtype, args.block_size) == ("float32", "fp8", 64)
    assert (args.tool_call_parser, args.enable_auto_tool_choice, args.reasoning_parser) == ("hermes", True, "qwen3")
    assert (args.served_model_name, args.enable_prompt_tokens_details) == (["a", "b"], True)


def test_what_may_differ_is_its_own_if_it_has_any(tmp_path: Path):
    source = {"max_model_len": 2048, "max_num_seqs": 16, "tensor_parallel_size": 2, "enforce_eager": True}
    args = parsed("--max-model-len", "4096", source=source, folder=tmp_path)
    assert (args.max_model_len, args.max_num_seqs, args.tensor_parallel_size) == (4096, 16, 2)
    assert args.enforce_eager is True
    args = parsed("--tensor-parallel-size", "4", source=source, folder=tmp_path)
    assert args.tensor_parallel_size == 4


def test_adapters_are_taken_together_or_not_at_all(tmp_path: Path):
    source = {
        "enable_lora": True,
        "max_loras": 3,
        "lora_modules": [{"name": "fr", "path": "/adapters/fr"}, {"name": "de", "path": "/adapters/de"}],
    }
    args = parsed(source=source, folder=tmp_path)
    assert (args.enable_lora, args.max_loras) == (True, 3)
    assert [(module.name, module.path) for module in args.lora_modules] == [
        ("fr", "/adapters/fr"),
        ("de", "/adapters/de"),
    ]
    args = parsed("--enable-lora", "--lora-modules", "it=/mine", source=source, folder=tmp_path)
    assert [module.name for module in args.lora_modules] == ["it"]
    assert args.max_loras != 3


def test_a_chat_template_comes_as_text_and_is_served_from_a_file(tmp_path: Path):
    args = parsed(source={"chat_template": "/etc/passwd"}, folder=tmp_path)
    assert Path(args.chat_template).parent == tmp_path
    assert Path(args.chat_template).read_text() == "/etc/passwd"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "--trust-remote-code"),
        ("dtype", "float32 --trust-remote-code"),
        ("served_model_name", ["ok", "--trust-remote-code"]),
        ("tool_call_parser", "-x"),
        ("lora_modules", [{"name": "fr", "path": "--x"}]),
        ("block_size", "64"),
        ("trust_remote_code", True),
        ("tool_parser_plugin", "/tmp/code.py"),
        ("max_num_seqs", 0),
    ],
)
def test_what_is_no_value_of_a_known_argument_is_refused(field: str, value: Any):
    with pytest.raises(msgspec.ValidationError):
        wish({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensor_parallel_size", 0), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.1), ("model", "--x")],
)
def test_wishes_that_make_no_sense_are_refused(field: str, value: Any):
    with pytest.raises(msgspec.ValidationError, match=field):
        wish(**{field: value})


def test_an_instance_reports_what_another_one_needs(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    args = parser.parse_args(
        ["some/model", "--chat-template", str(template), "--max-num-seqs", "8", "--tool-call-parser", "hermes"]
    )
    args.model = "some/model"
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2048, dtype="torch.float32", quantization=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(block_size=128),
    )
    found = reported(args, config)
    assert json.loads(json.dumps(found)) == found
    assert found["served_model_name"] == ["some/model"]
    assert (found["dtype"], found["block_size"], found["max_model_len"]) == ("float32", 128, 2048)
    assert (found["tensor_parallel_size"], found["max_num_seqs"]) == (2, 8)
    assert (found["chat_template"], found["tool_call_parser"]) == ("{{ messages }}", "hermes")
    assert "enable_lora" not in found
    # What one instance reports, another one takes.
    assert msgspec.convert(found, EngineArguments).block_size == 128
