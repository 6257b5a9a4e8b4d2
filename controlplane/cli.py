"""The `vllm-hi` command: start the control plane, run the demo, look at this machine.

vllm-hi host --port 8002     control plane only; instances join it with `vllm serve ... --vllm-hi-host`
vllm-hi demo                 everything on this machine, with one scripted migration under load
vllm-hi doctor               what this machine and the installed vLLM offer
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from controlplane.preparation import check_start, report
from controlplane.processes import ManagedProcess, ProcessFailed, adopt_orphans
from controlplane.serving import InstanceOptions
from controlplane.supervisor import ROOT, Stack, StackOptions, write_private

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `vllm-hi`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="vllm-hi", description="Live migration of in-flight requests between vLLMs.")
    commands = parser.add_subparsers(dest="command", required=True)
    host = commands.add_parser("host", help="start the control plane: panel, API, /v1, worker")
    host.add_argument("--port", type=int, default=8002, help="port of panel, API and /v1 (default: 8002)")
    demo = commands.add_parser("demo", help="start everything on this machine and migrate once under load")
    demo.add_argument("--port", type=int, default=8002, help="port of panel, API and /v1 (default: 8002)")
    commands.add_parser("doctor", help="say what this machine and the installed vLLM offer")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return _doctor()
    run = _host if options.command == "host" else _demo
    try:
        return asyncio.run(_until_signal(run, options.port))
    except ProcessFailed as error:
        print(f"\nvllm-hi: {error}", file=sys.stderr)
        return 1


async def _until_signal(run: Callable[[Stack], Coroutine[None, None, int]], port: int) -> int:
    """Runs `run` until it returns or a signal comes; whatever happens, nothing that was started stays."""
    adopt_orphans()
    stack = Stack(_options(port, with_instances=run is _demo))
    working = asyncio.ensure_future(run(stack))
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            print("\nStopping everything ...", file=sys.stderr)
            working.cancel()
        else:
            stack.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        return await working
    except asyncio.CancelledError:
        return 130
    finally:
        await stack.stop()


def _options(port: int, with_instances: bool) -> StackOptions:
    environment = os.environ
    instances = None
    if with_instances:
        instances = InstanceOptions(
            model=environment.get("MODEL", ""),
            served_model_name=environment.get("MODEL_NAME") or _served_name(environment.get("MODEL", "")),
            dtype=environment.get("DEMO_DTYPE") or "float32",
        )
    return StackOptions(
        state_dir=Path(environment.get("VLLM_HI_STATE_DIR") or ".demo"),
        panel_port=port,
        # The demo brings everything along; a control plane joins what the operator has.
        redis_url=None if with_instances else environment.get("REDIS_URL"),
        database_url=None if with_instances else environment.get("DATABASE_URL"),
        join_token=environment.get("VLLM_HI_TOKEN") or None,
        instances=instances,
        say=_say,
    )


def _served_name(model: str) -> str:
    return Path(model).name.lower() if model else "smollm2-135m"


# -- vllm-hi host ------------------------------------------------------------------------------------------------------


async def _host(stack: Stack) -> int:
    await stack.start()
    _publish_credentials(stack)
    print(
        f"\n  Panel      {stack.url}\n  Login      {stack.username}, password in {_credentials(stack)}\n"
        f"  Join       VLLM_HI_TOKEN is in {stack.state_dir / 'secrets.json'} unless you set it; then\n"
        f"             vllm serve MODEL --vllm-hi-type A --vllm-hi-host {stack.url.removeprefix('http://')}\n"
        f"  Logs       {stack.logs}\n  Ctrl-C stops it.\n",
        flush=True,
    )
    await stack.watch()
    return 0


# -- vllm-hi demo ------------------------------------------------------------------------------------------------------


async def _demo(stack: Stack) -> int:
    once = os.environ.get("DEMO_ONCE", "") not in ("", "0")
    _credentials(stack).unlink(missing_ok=True)
    _say("Before anything is started")
    if not report(check_start()):
        return 1
    if stack.options.instances and not stack.options.instances.model:
        stack.use_model(await _chat_model())
    await stack.start()
    passed = await _scripted_migration(stack)
    if once:
        return 0 if passed else 1
    if not passed:
        print("\nThe scripted migration did not go as it should; everything stays up so that you can look.", flush=True)
    await stack.until_registered(stack.instances.values())
    _publish_credentials(stack)
    _print_welcome(stack)
    await stack.watch()
    return 0


async def _chat_model() -> str:
    """Makes the model on first use. In a process of its own: torch stays out of this one."""
    maker = ManagedProcess("model", [sys.executable, "-m", "benchmarks.demo_models"], dict(os.environ), None, ROOT)
    await _run_foreground(maker, "the demo model cannot be made; see above")
    return str(_cache() / "models" / "smollm2")


def _cache() -> Path:
    return Path(os.environ.get("VLLM_HI_CACHE") or ROOT / ".cache").absolute()


async def _scripted_migration(stack: Stack) -> bool:
    """Runs the load client; its table and JSON line go to our own output."""
    assert stack.options.instances
    command = [sys.executable, "-m", "benchmarks.live_migration", "--url", stack.url]
    command += ["--model", stack.options.instances.served_model_name]
    command += ["--source", stack.instances["A"].id, "--target", stack.instances["B"].id]
    environment = {**os.environ, "VLLM_HI_API_TOKEN": stack.api_token}
    client = ManagedProcess("live migration", command, environment, None, ROOT)
    with contextlib.suppress(ProcessFailed):
        await _run_foreground(client, "")
        return True
    return False


async def _run_foreground(process: ManagedProcess, complaint: str) -> None:
    await process.start()
    try:
        if await process.wait() != 0:
            raise ProcessFailed(complaint)
    finally:
        process.kill_family()


def _print_welcome(stack: Stack) -> None:
    assert stack.options.instances
    name = stack.options.instances.served_model_name
    bearer = f'-H "Authorization: Bearer {stack.api_token}"'
    chat = json.dumps({"model": name, "stream": True, "messages": [{"role": "user", "content": "Tell me a story."}]})
    pair = {letter: instance.id for letter, instance in stack.instances.items()}
    # The scripted run swapped the roles: B serves now.
    move = json.dumps({"source": pair["B"], "target": pair["A"], "migration_type": "preserve_source"})
    print(
        f"\n  Panel      {stack.url}\n  Login      {stack.username} / {stack.password}\n"
        f"  Account    {_credentials(stack)}\n  Logs       {stack.logs}\n\n"
        f"  curl -N {stack.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{chat}'\n"
        f"  curl {stack.url}/api/v1/instances {bearer}\n"
        f"  curl {stack.url}/api/v1/migrations {bearer} -H 'Content-Type: application/json' -d '{move}'\n\n"
        "  Ctrl-C stops everything.\n",
        flush=True,
    )


def _credentials(stack: Stack) -> Path:
    return stack.state_dir / "credentials.json"


def _publish_credentials(stack: Stack) -> None:
    account = {
        "url": stack.url,
        "username": stack.username,
        "password": stack.password,
        "api_token": stack.api_token,
    }
    write_private(_credentials(stack), json.dumps(account, indent=2) + "\n")


# -- vllm-hi doctor ----------------------------------------------------------------------------------------------------


def _doctor() -> int:
    good = report(check_start())
    # In a process of its own: the panel's code does not import vLLM, and importing it takes seconds.
    script = (
        "import json; from vllm_plugin.compat import probes, vllm_version;print(json.dumps([vllm_version(), probes()]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(
            "  note  vLLM cannot be looked at here: " + (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        )
        return 0 if good else 1
    version, probes = json.loads(result.stdout.splitlines()[-1])
    missing = [name for name, found in probes.items() if not found]
    for name, found in probes.items():
        print(f"  ok    probe {name}" if found else f"  ERROR probe {name}: this vLLM does not have it")
    if missing:
        print(f"  ERROR vLLM {version} serves, and migration answers 501: it lacks {', '.join(missing)}.")
    else:
        print(f"  ok    vLLM {version} has all that migration needs ({len(probes)} probes).")
    return 0 if good and not missing else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
