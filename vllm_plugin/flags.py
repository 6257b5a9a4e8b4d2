"""The flags of `vllm serve`, and what they switch on.

vLLM loads `register` in each of its processes. In the process that parses the command line it extends the hook that
vLLM offers for updating the parser; the parsed values become engine arguments that vLLM has anyway (scheduler class,
worker extension) and environment variables that the engine and worker processes inherit. Without the flags and without
`VLLM_HI_TYPE` nothing changes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from vllm_plugin.keeper import MODEL_VARIABLE, is_kept, serve_on_shared_port
from vllm_plugin.settings import PluginSettings, migration_requested, nap_seconds

__all__ = ["ENDPOINT_PLUGIN", "GENERAL_PLUGIN", "SCHEDULER_CLS", "WORKER_EXTENSION_CLS", "register"]

logger = logging.getLogger("vllm.vllm_hi")

GENERAL_PLUGIN = "vllm_hi"
ENDPOINT_PLUGIN = "vllm_hi_endpoints"
SCHEDULER_CLS = "vllm_plugin.scheduler.MigrationScheduler"
WORKER_EXTENSION_CLS = "vllm_plugin.worker.MigrationWorker"

#: The groups that load everything as long as `VLLM_PLUGINS` is unset.
_ALLOWLISTED_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)

#: Plugins that do something more when they are named in `VLLM_PLUGINS` than when that is unset. Naming them for the
#: user would switch that on: this one then fetches adapters from a remote hub.
_OPT_IN_BY_NAME = frozenset({"lora_hf_hub_resolver"})

_FLAGS = {
    "vllm_hi_type": "VLLM_HI_TYPE",
    "vllm_hi_host": "VLLM_HI_HOST",
    "vllm_hi_data_port": "VLLM_HI_DATA_PORT",
    "vllm_hi_standby": "VLLM_HI_STANDBY",
}


def register() -> None:
    """Entry point of `vllm.general_plugins`; may run several times in a process."""
    _extend_parser_hook()
    if migration_requested():
        _install_engine_side()
        # A wrong value is reported where the command line is parsed.
        with contextlib.suppress(ValueError):
            _sleep_while_waiting(nap_seconds())


def _sleep_while_waiting(seconds: float) -> None:
    from vllm_plugin import compat

    if seconds and not compat.sleep_while_waiting(seconds):
        logger.warning("vLLM-HI: VLLM_HI_NAP_US changes nothing, this vLLM waits in another way")


def _extend_parser_hook() -> None:
    from vllm.platforms import current_platform

    hook = current_platform.pre_register_and_update
    if isinstance(hook, functools.partial) and hook.func is _update_parser:
        return
    # On the one platform object, not on its class; a partial of module-level functions stays picklable.
    current_platform.pre_register_and_update = functools.partial(_update_parser, hook)


def _update_parser(original: Callable[..., None], parser: argparse.ArgumentParser | None = None) -> None:
    """vLLM's `pre_register_and_update`, and then our flags on parsers that describe a server."""
    original(parser)
    if parser is None or not _serves(parser):
        return
    group = parser.add_argument_group(
        title="vLLM-HI", description="Live migration of in-flight requests between instances."
    )
    group.add_argument(
        "--vllm-hi-type",
        choices=["A", "B"],
        help="Take part in live migration: A serves requests, B is a standby. Default: $VLLM_HI_TYPE.",
    )
    group.add_argument("--vllm-hi-host", help="Address of the panel as ip:port. Default: $VLLM_HI_HOST.")
    group.add_argument(
        "--vllm-hi-data-port",
        type=int,
        help="Port for KV blocks from other instances, 0 for a free one. Default: $VLLM_HI_DATA_PORT, else 0.",
    )
    group.add_argument(
        "--vllm-hi-standby",
        choices=["cold", "warm"],
        help="As a standby: cold has no engine until a migration needs one, and ends it again afterwards; warm keeps "
        "it up. Default: $VLLM_HI_STANDBY, else a B starts cold and keeps the engine that it was given.",
    )
    # The values can only be judged together when all are parsed, whichever came first on the command line.
    parse = functools.partial(_parse_known_args, parser, parser.parse_known_args)
    parser.parse_known_args = parse  # type: ignore[assignment,method-assign]


def _serves(parser: argparse.ArgumentParser) -> bool:
    """True for `vllm serve` and the API server module; `vllm launch` and `vllm run-batch` have no engine to migrate."""
    known = {option for action in parser._actions for option in action.option_strings}
    return {"--api-server-count", "--scheduler-cls"} <= known and "launch" not in parser.prog.split()


def _parse_known_args(
    parser: argparse.ArgumentParser, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[argparse.Namespace, list[str]]:
    namespace, rest = original(*args, **kwargs)
    try:
        _apply(namespace, parser)
    except ValueError as error:
        parser.error(str(error))
    return namespace, rest


def _apply(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Completes the parsed arguments of a server that takes part; leaves all others alone.

    Raises:
        ValueError: a flag is missing, wrong, or cannot be combined with migration.
    """
    given = {name: str(getattr(args, dest)) for dest, name in _FLAGS.items() if getattr(args, dest) is not None}
    environ = {**os.environ, **given}
    if not migration_requested(environ):
        if given:
            raise ValueError("--vllm-hi-host, -data-port and -standby need --vllm-hi-type A or B")
        return
    settings = PluginSettings.from_env(environ)
    _refuse_conflicts(args)
    stands_by = settings.has_standby_process and not is_kept()
    if stands_by and not hasattr(args, "dispatch_function"):
        raise ValueError("a cold standby needs `vllm serve`: start it that way, or add --vllm-hi-standby warm")
    args.vllm_hi_type = settings.instance_type
    args.vllm_hi_host = environ["VLLM_HI_HOST"]
    args.vllm_hi_data_port = settings.data_port
    os.environ.update(
        VLLM_HI_TYPE=args.vllm_hi_type,
        VLLM_HI_HOST=args.vllm_hi_host,
        VLLM_HI_DATA_PORT=str(args.vllm_hi_data_port),
        VLLM_PLUGINS=_allowlist(os.environ.get("VLLM_PLUGINS")),
    )
    if settings.standby is not None:
        os.environ["VLLM_HI_STANDBY"] = settings.standby
    args.vllm_hi_standby = settings.standby
    if stands_by:
        _stand_by(args, parser)
        return
    if _install_engine_side():
        args.scheduler_cls = SCHEDULER_CLS
        args.worker_extension_cls = WORKER_EXTENSION_CLS
    if is_kept():
        args.model_tag = os.environ.get(MODEL_VARIABLE) or args.model_tag
        args.dispatch_function = serve_on_shared_port


def _stand_by(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """`vllm serve` calls what its parser has put into `dispatch_function`: a standby instead of an engine."""
    # Only here: the other processes of vLLM have no use for it.
    from vllm_plugin import standby
    from vllm_plugin.engine_arguments import OwnArguments

    args.dispatch_function = functools.partial(standby.run, OwnArguments(args, parser))


def _refuse_conflicts(args: argparse.Namespace) -> None:
    if args.scheduler_cls not in (None, SCHEDULER_CLS):
        raise ValueError("--scheduler-cls cannot be combined with --vllm-hi-type, which sets its own: drop one of them")
    if args.worker_extension_cls not in ("", None, WORKER_EXTENSION_CLS):
        raise ValueError(
            "--worker-extension-cls cannot be combined with --vllm-hi-type, which sets its own: drop one of them"
        )
    for option, present in {
        "--headless": args.headless,
        "--grpc": args.grpc,
        "--uds": args.uds,
        "--ssl-certfile": args.ssl_certfile,
        # It refuses every VLLM_ variable that is not vLLM's own, and the join token comes in one.
        "--fail-on-environ-validation": args.fail_on_environ_validation,
        "--api-server-count above 1": (args.api_server_count or 1) > 1,
        "--data-parallel-size above 1": args.data_parallel_size > 1,
        "VLLM_USE_RUST_FRONTEND": os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
    }.items():
        if present:
            raise ValueError(f"{option} cannot be combined with --vllm-hi-type in this version: drop one of them")


def _allowlist(current: str | None) -> str:
    """Returns `VLLM_PLUGINS` with ours in it.

    Endpoint plugins load only when named there, but once it is set it decides about every group: where the user had
    left it unset, all that would have loaded without it are named. Other endpoint plugins would not have.
    """
    if current is None:
        names = {entry.name for group in _ALLOWLISTED_GROUPS for entry in entry_points(group=group)}
        listed = sorted(names - _OPT_IN_BY_NAME)
    else:
        listed = [name for name in current.split(",") if name]
    return ",".join(dict.fromkeys([*listed, GENERAL_PLUGIN, ENDPOINT_PLUGIN]))


def _install_engine_side() -> bool:
    """Adds the engine's side; returns False where this vLLM lacks something that it needs."""
    from vllm_plugin import compat

    missing = compat.missing_probes()
    if missing:
        logger.error("vLLM-HI: migration is off, this vLLM lacks %s; the server runs without it", ", ".join(missing))
        return False
    try:
        compat.install_engine_utility()
    except RuntimeError as error:
        logger.error("vLLM-HI: migration is off: %s; the server runs without it", error)
        return False
    return True
