"""A standby without an engine: holds the instance's port, and runs `vllm serve` there when a migration asks for it.

`vllm serve --vllm-hi-type B` comes here instead of building an engine, unless `--vllm-hi-standby warm` says otherwise.
The engine is a child on the same port (`keeper.py`): while it starts, this process answers and tells how far it is; as
soon as it listens, this process does not any more, and no client request ever passes through it.

| state | event | next |
|---|---|---|
| down | instantiate | instantiating |
| instantiating | the child has registered with the panel | up |
| instantiating | it failed, took too long, or was aborted | stopping, then down |
| up | it ended by itself | down |
| up | it became a standby and was told to stay cold (`--vllm-hi-standby cold`) | stopping, then down |

An A with `--vllm-hi-standby cold` starts with its engine, and ends with it unless the engine was put down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import httpx

from vllm_plugin import compat, devices
from vllm_plugin.calls import CallRefused
from vllm_plugin.engine_arguments import Instantiate, OwnArguments, options
from vllm_plugin.engine_process import EngineProcess, adopt_orphans
from vllm_plugin.keeper import ID_VARIABLE, MODEL_VARIABLE
from vllm_plugin.registration import InstanceFacts, Registration, identity
from vllm_plugin.settings import PluginSettings
from vllm_plugin.standby_app import standby_app
from vllm_plugin.standby_listener import PortTaken, StandbyListener
from vllm_plugin.start_progress import StartProgress

__all__ = ["Standby", "run"]

logger = logging.getLogger("vllm.vllm_hi.standby")

State = Literal["down", "instantiating", "up", "stopping"]
#: Why an engine is stopped.
Reason = Literal["aborted", "deadline", "put_down", "leaving"]
#: Seconds that vLLM has to end in order.
STOP_GRACE_S = 15.0
#: An A that starts with its engine takes as long as it takes.
NO_DEADLINE_S = 86_400.0


def run(own: OwnArguments, args: Namespace) -> None:
    """In place of vLLM's own `serve`."""
    settings = PluginSettings.from_env()
    try:
        code = asyncio.run(Standby(settings, own, facts(settings, args)).run())
    except PortTaken as error:
        logger.error("vLLM-HI: %s", error)
        code = 1
    sys.exit(code)


def facts(settings: PluginSettings, args: Namespace) -> InstanceFacts:
    """What can be said of an instance before it has an engine."""
    model = args.model_tag or args.model
    names = args.served_model_name or [model]
    world_size = args.tensor_parallel_size * args.pipeline_parallel_size
    parameters: dict[str, Any] = {"model": model, "served_model_names": list(names)}
    if isinstance(args.max_model_len, int) and args.max_model_len > 0:
        parameters["max_model_len"] = args.max_model_len
    return InstanceFacts(
        ip=settings.bind if args.host in (None, "", "0.0.0.0", "::") else args.host,
        port=args.port,
        served_model_name=names[0],
        inference_params=parameters,
        topology={
            "tensor_parallel_size": args.tensor_parallel_size,
            "pipeline_parallel_size": args.pipeline_parallel_size,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "visible_gpu_ids": devices.visible_gpu_ids(world_size),
            **devices.described(),
        },
    )


class Standby:
    """One instance that has an engine only when it needs one. Lives on one event loop; nothing here blocks it.

    Args:
        own: what it was started with.
        command: how `vllm serve` was started; options are appended to it.
        transport: of the connections to the panel, for tests; None = the network.
    """

    def __init__(
        self,
        settings: PluginSettings,
        own: OwnArguments,
        facts: InstanceFacts,
        command: list[str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.state: State = "down"
        self._settings = settings
        self._own = own
        self._facts = facts
        self._transport = transport
        self._command = command or [sys.executable, *sys.orig_argv[1:]]
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-hi-standby-")
        self._missing = compat.missing_probes()
        host = getattr(own.values, "host", None) or ""
        self._listener = StandbyListener(standby_app(self, settings.token), host, facts.port)
        self._vllm_hi_id: str | None = None
        self._registration: Registration | None = None
        self._wish: Instantiate | None = None
        self._attempts: dict[str, int] = {}
        self._progress = StartProgress()
        self._engine: EngineProcess | None = None
        self._stopping: Reason | None = None
        self._error = ""
        self._destroyed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over: asyncio.Future[int]

    async def run(self) -> int:
        """Lives until it is told to end; returns the exit code.

        Raises:
            PortTaken: somebody else has the port.
        """
        adopt_orphans()
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        self._listener.hold()
        try:
            if self._settings.instance_type == "A":
                self._begin(Instantiate(job="start", attempt=1, deadline_s=NO_DEADLINE_S), "A")
            else:
                await self._stand_by()
            return await self._over
        finally:
            await self._say_goodbye()
            await self._listener.stop()
            self._listener.release()
            self._folder.cleanup()

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """As of an instance with an engine, with empty values for what only an engine has."""
        return {
            "role": "standby",
            "migration": {"supported": not self._missing, "missing_probes": self._missing},
            "factors": {},
            "adapters": [],
            "kv": {},
            "requests": {},
            "data_host": self._settings.bind,
            "data_port": 0,
            "data_ports": [],
            "control_port": 0,
            "transport": "",
            "session": None,
            **identity(),
            "vllm_hi_id": self._known_as(),
            "instance_type": "B",
            "served_model_name": self._facts.served_model_name,
            "engine": self.engine(),
        }

    def engine(self) -> dict[str, Any]:
        """`{state, percent, phase, error}`: how far the engine is; `error` of the last start that failed."""
        starting = self.state == "instantiating"
        return {
            "state": self.state,
            "percent": self._progress.percent if starting else 0,
            "phase": self._progress.phase if starting else "",
            "error": self._error,
        }

    def instantiate(self, wish: Instantiate) -> dict[str, Any]:
        """Starts the engine; returns as `engine`. Asked again by the same job it only returns that.

        Raises:
            CallRefused: 409 `stale_attempt`, `engine_busy`.
        """
        self._check_attempt(wish.job, wish.attempt)
        if self.state == "down":
            self._begin(wish, "B")
        elif self.state == "stopping":
            raise CallRefused(409, "engine_busy", "The engine of an earlier start is just ending: try again.")
        elif self._wish is None or self._wish.job != wish.job:
            raise CallRefused(409, "engine_busy", "The engine is just being brought up for another migration.", "job")
        return self.engine()

    def abort(self, job: str, attempt: int) -> None:
        """Stops a start that this job has asked for. Raises CallRefused: 409 `stale_attempt`."""
        self._check_attempt(job, attempt)
        if self.state == "instantiating" and self._wish is not None and self._wish.job == job:
            self._stop_engine("aborted")

    def _check_attempt(self, job: str, attempt: int) -> None:
        seen = self._attempts.get(job, 0)
        if attempt < seen:
            raise CallRefused(409, "stale_attempt", f"Attempt {seen} of this job was seen already.", "attempt")
        self._attempts[job] = attempt

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _begin(self, wish: Instantiate, role: Literal["A", "B"]) -> None:
        self.state, self._wish, self._progress, self._error = "instantiating", wish, StartProgress(), ""
        self._stopping = None
        self._engine = EngineProcess(self._progress.read, self._hear)
        self._keep(self._run_engine(self._engine, wish, role))

    async def _run_engine(self, engine: EngineProcess, wish: Instantiate, role: Literal["A", "B"]) -> None:
        command = [*self._command, *options(wish, self._own, Path(self._folder.name)), f"--vllm-hi-type={role}"]
        logger.info("vLLM-HI: brings up the engine: %s", " ".join(command))
        deadline = asyncio.get_running_loop().call_later(wish.deadline_s, self._too_late)
        code: int | None = None
        try:
            await engine.start(command, self._environment(wish))
            if self._stopping is not None:
                self._keep(engine.stop(STOP_GRACE_S))
            code = await engine.wait()
        except OSError as error:
            self._progress.read(f"OSError: {error}")
        finally:
            deadline.cancel()
        if engine.pid is not None:
            await engine.clear_away()
        await self._engine_ended(code)

    def _environment(self, wish: Instantiate) -> dict[str, str]:
        environment = {**os.environ, ID_VARIABLE: self._known_as() or ""}
        environment.pop(MODEL_VARIABLE, None)
        if wish.model is not None:
            environment[MODEL_VARIABLE] = wish.model
        source = wish.engine_args
        size = 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            own = getattr(self._own.values, name, 1) if self._own.has(name) else None
            size *= getattr(wish, name) or own or getattr(source, name) or 1
        binding = devices.thread_binding(size) if self._facts.topology.get("device_kind") == "cpu" else None
        if binding is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = binding
        return environment

    def _hear(self, message: dict[str, Any]) -> None:
        """What the plugin in the engine's process says (`keeper.py`)."""
        event = message.get("event")
        if event == "listening":
            self._progress.reach(95, "warming up")
            self._keep(self._listener.stop())
        elif event == "registered" and self.state == "instantiating":
            self.state = "up"
            self._progress.reach(100, "serving")
            self._keep(self._end_registration())
            logger.info("vLLM-HI: the engine is up")
        elif event == "put_down":
            self._keep(self._put_down())
        elif event == "destroyed":
            self._destroyed = True

    async def _put_down(self) -> None:
        # First: whoever asks in the meantime gets an answer, and the panel no pause between heartbeats.
        await self._stand_by()
        self._stop_engine("put_down")

    def _too_late(self) -> None:
        if self.state == "instantiating":
            self._stop_engine("deadline")

    def _stop_engine(self, reason: Reason) -> None:
        if self._engine is None or self._stopping is not None:
            return
        self._stopping = reason
        self.state = "stopping"
        if self._engine.pid is not None:
            self._keep(self._engine.stop(STOP_GRACE_S))

    async def _engine_ended(self, code: int | None) -> None:
        """The child and all of its descendants are gone."""
        was, reason, self._engine = self.state, self._stopping, None
        as_plain = self._settings.instance_type == "A" and reason is None
        if reason == "leaving" or self._destroyed or as_plain:
            # As `vllm serve` without a standby around it.
            self._finish(0 if reason == "leaving" or self._destroyed else code or 1)
            return
        wish = self._wish
        if reason == "deadline" and wish is not None:
            self._error = (
                f"The engine was not up after {wish.deadline_s:g} s, while {self._progress.phase}. "
                "Give it more time (VLLM_HI_INSTANTIATE_DEADLINE_S), or look into the log of the standby."
            )
        elif reason is None:
            what = "did not come up" if was == "instantiating" else "ended by itself"
            self._error = f"The engine {what}: {self._progress.failure(code)}"
        if self._error:
            logger.error("vLLM-HI: %s", self._error)
        self.state = "down"
        try:
            await self._stand_by()
        except OSError as error:
            logger.error("vLLM-HI: cannot stand by any more: %s", error)
            self._finish(1)

    # -- port and panel ------------------------------------------------------------------------------------------------

    async def _stand_by(self) -> None:
        await self._listener.start()
        if self._registration is None:
            self._registration = self._new_registration()
            self._registration.start()

    def _known_as(self) -> str | None:
        return self._registration.vllm_hi_id if self._registration else self._vllm_hi_id

    def _new_registration(self) -> Registration:
        async def status() -> dict[str, Any]:
            return self.status()

        registration = Registration(self._settings, self._facts, status, lambda: True, self._transport)
        registration.vllm_hi_id = self._vllm_hi_id
        return registration

    async def _end_registration(self) -> None:
        """The engine speaks for this instance from now on."""
        registration, self._registration = self._registration, None
        if registration is not None:
            self._vllm_hi_id = registration.vllm_hi_id
            await registration.stop(goodbye=False)

    async def _say_goodbye(self) -> None:
        registration, self._registration = self._registration or self._new_registration(), None
        await registration.stop(goodbye=registration.vllm_hi_id is not None)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """At SIGTERM and SIGINT."""
        logger.info("vLLM-HI: the standby ends")
        if self._engine is None:
            self._finish(0)
            return
        self._stop_engine("leaving")
        self._stopping = "leaving"

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("vLLM-HI: the standby failed", exc_info=error)
            self._finish(1)
