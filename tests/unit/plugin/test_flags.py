from __future__ import annotations

import argparse
import functools
import importlib.metadata
import inspect
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_plugin import compat, flags, standby
from vllm_plugin.keeper import serve_on_shared_port

HOST = ["--vllm-hi-host", "127.0.0.1:8002"]


@pytest.fixture(autouse=True)
def installed(environment: pytest.MonkeyPatch) -> list[str]:
    """Our hook is on the platform, as after vLLM has loaded its plugins; nothing is really added to the engine."""
    calls: list[str] = []
    environment.setattr(compat, "missing_probes", list)
    environment.setattr(compat, "install_engine_utility", lambda: calls.append("installed"))
    flags.register()
    return calls


def parse(*arguments: str) -> argparse.Namespace:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(list(arguments))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(*arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_HI_") or name == "VLLM_PLUGINS"}


def test_plain_serve_is_unchanged(environment: pytest.MonkeyPatch, installed: list[str]):
    arguments = ["some/model", "--dtype", "float32", "--max-model-len", "2048"]
    before = variables()
    with_plugin = vars(parse(*arguments))
    environment.delattr(current_platform, "pre_register_and_update")
    without_plugin = vars(parse(*arguments))
    ours = {"vllm_hi_type", "vllm_hi_host", "vllm_hi_data_port", "vllm_hi_standby"}
    assert {name: with_plugin.pop(name) for name in ours} == dict.fromkeys(ours)
    assert with_plugin == without_plugin
    assert variables() == before
    assert installed == []


def test_flags_set_engine_arguments_and_the_environment(installed: list[str], tmp_path: Path):
    args = parse(str(tmp_path), "--vllm-hi-type", "A", *HOST, "--vllm-hi-data-port", "9000")
    assert (args.vllm_hi_type, args.vllm_hi_host, args.vllm_hi_data_port) == ("A", "127.0.0.1:8002", 9000)
    args.model = args.model_tag  # As `vllm serve` does; a folder, so that nothing is looked up on a hub.
    engine_args = AsyncEngineArgs.from_cli_args(args)
    assert engine_args.scheduler_cls == "vllm_plugin.scheduler.MigrationScheduler"
    assert engine_args.worker_extension_cls == "vllm_plugin.worker.MigrationWorker"
    assert os.environ["VLLM_HI_TYPE"] == "A"
    assert os.environ["VLLM_HI_HOST"] == "127.0.0.1:8002"
    assert os.environ["VLLM_HI_DATA_PORT"] == "9000"
    assert installed == ["installed"]


def test_environment_alone_is_enough(environment: pytest.MonkeyPatch):
    environment.setenv("VLLM_HI_TYPE", "B")
    environment.setenv("VLLM_HI_STANDBY", "warm")
    environment.setenv("VLLM_HI_HOST", "127.0.0.1:8002")
    args = parse("some/model")
    assert (args.vllm_hi_type, args.vllm_hi_host, args.vllm_hi_data_port) == ("B", "127.0.0.1:8002", 0)
    assert args.scheduler_cls == flags.SCHEDULER_CLS
    assert "vllm_hi_endpoints" in os.environ["VLLM_PLUGINS"]


def test_a_flag_wins_over_its_variable(environment: pytest.MonkeyPatch):
    environment.setenv("VLLM_HI_TYPE", "B")
    environment.setenv("VLLM_HI_DATA_PORT", "9999")
    args = parse("some/model", "--vllm-hi-type=A", *HOST)
    assert (os.environ["VLLM_HI_TYPE"], args.vllm_hi_data_port) == ("A", 9999)


def serve(*arguments: str) -> tuple[argparse.Namespace, Any]:
    """Parses as `vllm serve` does; returns also what it would call."""
    from vllm.entrypoints.cli.serve import cmd_init

    parser = FlexibleArgumentParser(prog="vllm")
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser")).set_defaults(dispatch_function=command.cmd)
    return parser.parse_args(["serve", *arguments]), command.cmd


@pytest.mark.parametrize(
    "role", [["A"], ["A", "--vllm-hi-standby", "warm"], ["B", "--vllm-hi-standby", "warm"]], ids="-".join
)
def test_through_the_subcommand(environment: pytest.MonkeyPatch, role: list[str]):
    args, plain = serve("some/model", *HOST, "--vllm-hi-type", *role)
    assert (args.subparser, args.scheduler_cls, args.model_tag) == ("serve", flags.SCHEDULER_CLS, "some/model")
    assert args.dispatch_function == plain


@pytest.mark.parametrize(
    "role", [["B"], ["B", "--vllm-hi-standby", "cold"], ["A", "--vllm-hi-standby", "cold"]], ids="-".join
)
def test_a_cold_standby_takes_the_place_of_the_engine(
    environment: pytest.MonkeyPatch, installed: list[str], role: list[str]
):
    args, plain = serve("some/model", "--dtype", "float32", *HOST, "--vllm-hi-type", *role)
    assert args.dispatch_function != plain
    assert args.dispatch_function.func is standby.run
    own = args.dispatch_function.args[0]
    assert (own.values.dtype, own.has("dtype"), own.has("tensor_parallel_size")) == ("float32", True, False)
    assert "--dtype" in own.names
    assert os.environ["VLLM_HI_TYPE"] == role[0]
    # The engine's side is for the engine's process.
    assert installed == []
    assert args.scheduler_cls is None


def test_the_engine_of_a_standby_is_an_engine_on_the_same_port(environment: pytest.MonkeyPatch, installed: list[str]):
    environment.setenv("VLLM_HI_STANDBY_PIPE", "17")
    environment.setenv("VLLM_HI_STANDBY_MODEL", "other/model")
    args, _ = serve("some/model", *HOST, "--vllm-hi-type", "B")
    assert args.dispatch_function is serve_on_shared_port
    assert (args.model_tag, args.scheduler_cls, installed) == ("other/model", flags.SCHEDULER_CLS, ["installed"])
    environment.delenv("VLLM_HI_STANDBY_MODEL")
    assert serve("some/model", *HOST, "--vllm-hi-type", "B")[0].model_tag == "some/model"


def test_vllm_has_what_the_engine_of_a_standby_calls():
    setup = compat.server_function("setup_server")
    assert inspect.signature(setup).parameters.keys() >= {"args"}
    parameters = list(inspect.signature(compat.server_function("run_server_worker")).parameters)
    assert parameters[:3] == ["listen_address", "sock", "args"]


def test_from_a_config_file(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("model: some/model\nvllm-hi-type: A\nvllm-hi-host: 127.0.0.1:8002\n")
    args = FlexibleArgumentParser(prog="vllm")
    serve = make_arg_parser(args.add_subparsers(dest="subparser").add_parser("serve"))
    assert serve.prog == "vllm serve"
    assert args.parse_args(["serve", "--config", str(config)]).scheduler_cls == flags.SCHEDULER_CLS


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scheduler-cls", "my.Scheduler", "--vllm-hi-type", "A", *HOST], "--scheduler-cls cannot be combined"),
        (["--vllm-hi-type", "A", *HOST, "--scheduler-cls", "my.Scheduler"], "--scheduler-cls cannot be combined"),
        (["--vllm-hi-type", "A", *HOST, "--worker-extension-cls", "my.Ext"], "--worker-extension-cls cannot be"),
        (["--vllm-hi-type", "A", *HOST, "--api-server-count", "2"], "--api-server-count above 1 cannot be combined"),
        (["--vllm-hi-type", "A", *HOST, "--data-parallel-size", "2"], "--data-parallel-size above 1 cannot be"),
        (["--vllm-hi-type", "A", *HOST, "--uds", "vllm.sock"], "--uds cannot be combined"),
        (["--vllm-hi-type", "A", *HOST, "--fail-on-environ-validation"], "--fail-on-environ-validation cannot be"),
        (["--vllm-hi-type", "A"], "VLLM_HI_HOST (--vllm-hi-host) is not set"),
        (["--vllm-hi-type", "A", "--vllm-hi-host", "8002"], "VLLM_HI_HOST (--vllm-hi-host) is '8002'"),
        (["--vllm-hi-type", "A", *HOST, "--vllm-hi-data-port", "70000"], "VLLM_HI_DATA_PORT is '70000'"),
        (["--vllm-hi-type", "C", *HOST], "invalid choice: 'C'"),
        (["--vllm-hi-type", "B", *HOST, "--vllm-hi-standby", "hot"], "invalid choice: 'hot'"),
        (["--vllm-hi-standby", "cold"], "need --vllm-hi-type"),
        # Not by `vllm serve`, whose place a standby takes.
        (["--vllm-hi-type", "B", *HOST], "a cold standby needs `vllm serve`"),
        (HOST, "need --vllm-hi-type"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], installed: list[str], arguments: list[str], sentence: str
):
    before = variables()
    assert sentence in refusal(capsys, "some/model", *arguments)
    assert variables() == before
    assert installed == []


def test_missing_token_is_refused(capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch):
    environment.delenv("VLLM_HI_TOKEN")
    assert "VLLM_HI_TOKEN is not set" in refusal(capsys, "some/model", "--vllm-hi-type", "A", *HOST)


def test_own_scheduler_is_refused_with_the_environment_too(
    capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch
):
    environment.setenv("VLLM_HI_TYPE", "A")
    environment.setenv("VLLM_HI_HOST", "127.0.0.1:8002")
    assert "--scheduler-cls cannot be combined" in refusal(capsys, "some/model", "--scheduler-cls", "my.Scheduler")


def test_own_scheduler_without_migration_is_left_alone():
    assert parse("some/model", "--scheduler-cls", "my.Scheduler").scheduler_cls == "my.Scheduler"


def test_unsupported_vllm_serves_without_us(
    environment: pytest.MonkeyPatch, installed: list[str], caplog: pytest.LogCaptureFixture
):
    environment.setattr(compat, "missing_probes", lambda: ["scheduler.schedule"])
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.ERROR):
        args = parse("some/model", "--vllm-hi-type", "A", *HOST)
    assert (args.scheduler_cls, args.worker_extension_cls) == (None, "")
    assert "scheduler.schedule" in caplog.text
    assert installed == []


def test_parsing_twice_gives_the_same(installed: list[str]):
    # vLLM parses an empty command line again to find out which arguments are not at their defaults.
    first = parse("some/model", "--vllm-hi-type", "A", *HOST)
    plugins = os.environ["VLLM_PLUGINS"]
    assert parse().scheduler_cls == first.scheduler_cls
    assert os.environ["VLLM_PLUGINS"] == plugins


def test_every_other_plugin_still_loads_and_none_that_asks_to_be_named(environment: pytest.MonkeyPatch):
    listed = {
        "vllm.general_plugins": ["vllm_hi", "lora_hf_hub_resolver", "theirs"],
        "vllm.platform_plugins": ["their_platform"],
        "vllm.stat_logger_plugins": ["their_stats"],
        "vllm.io_processor_plugins": [],
        "vllm.endpoint_plugins": ["vllm_hi_endpoints", "their_endpoints"],
    }
    found = [
        importlib.metadata.EntryPoint(name, "module:function", group) for group in listed for name in listed[group]
    ]
    environment.setattr(flags, "entry_points", lambda group: [entry for entry in found if entry.group == group])
    parse("some/model", "--vllm-hi-type", "A", *HOST)
    assert set(os.environ["VLLM_PLUGINS"].split(",")) == {
        "theirs", "their_platform", "their_stats", "vllm_hi", "vllm_hi_endpoints"
    }  # fmt: skip


def test_the_users_list_is_kept(environment: pytest.MonkeyPatch):
    environment.setenv("VLLM_PLUGINS", "theirs,vllm_hi")
    parse("some/model", "--vllm-hi-type", "A", *HOST)
    assert os.environ["VLLM_PLUGINS"] == "theirs,vllm_hi,vllm_hi_endpoints"


def test_registering_again_adds_nothing(environment: pytest.MonkeyPatch, installed: list[str]):
    hook = current_platform.pre_register_and_update
    flags.register()
    assert current_platform.pre_register_and_update is hook
    assert isinstance(hook, functools.partial)
    environment.setenv("VLLM_HI_TYPE", "A")
    flags.register()
    assert installed == ["installed"]


def test_the_platform_hook_still_calls_the_original(environment: pytest.MonkeyPatch):
    seen: list[object] = []
    flags._update_parser(seen.append, None)
    parser = argparse.ArgumentParser()
    flags._update_parser(seen.append, parser)
    assert seen == [None, parser]
    assert not any("--vllm-hi-type" in action.option_strings for action in parser._actions)


def test_launch_has_no_flags(environment: pytest.MonkeyPatch):
    environment.setenv("VLLM_HI_TYPE", "A")
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm launch render")).parse_args(["some/model"])
    assert not hasattr(args, "vllm_hi_type")
    assert args.scheduler_cls is None


def test_help_shows_the_flags(capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch):
    environment.setattr(sys, "argv", ["vllm", "serve"])
    with pytest.raises(SystemExit):
        parse("--help=vllm-hi")
    assert "--vllm-hi-data-port" in capsys.readouterr().out


def test_waiting_processes_sleep_only_on_demand(environment: pytest.MonkeyPatch):
    from vllm.distributed.device_communicators import shm_broadcast

    environment.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    before = shm_broadcast.sched_yield
    environment.setenv("VLLM_HI_TYPE", "A")
    flags.register()
    assert shm_broadcast.sched_yield is before
    environment.setenv("VLLM_HI_NAP_US", "a little")
    flags.register()
    assert shm_broadcast.sched_yield is before
    slept: list[float] = []
    environment.setattr(compat.time, "sleep", slept.append)
    environment.setenv("VLLM_HI_NAP_US", "500")
    flags.register()
    shm_broadcast.sched_yield()
    assert slept == [0.0005]


def test_a_vllm_that_waits_in_another_way_is_left_alone(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from vllm.distributed.device_communicators import shm_broadcast

    environment.delattr(shm_broadcast, "sched_yield")
    environment.setenv("VLLM_HI_TYPE", "A")
    environment.setenv("VLLM_HI_NAP_US", "500")
    with caplog.at_level(logging.WARNING, "vllm.vllm_hi"):
        flags.register()
    assert "VLLM_HI_NAP_US changes nothing" in caplog.text
    assert not hasattr(shm_broadcast, "sched_yield")
