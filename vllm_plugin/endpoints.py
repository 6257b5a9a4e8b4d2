"""HTTP endpoints of an instance (docs/protocol.md, section 4), in vLLM's API server.

They check the join token and the body and hand the call to the plugin's half in the engine core; nothing is decided
here. vLLM's own `--api-key` guards only the inference routes: it neither protects these nor gets in their way.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.background import BackgroundTask
from starlette.datastructures import State

from vllm_plugin import compat
from vllm_plugin.calls import Call, CallRefused, Handler, Name, bad_field, guarded, read_body
from vllm_plugin.engine_arguments import Instantiate
from vllm_plugin.flags import ENDPOINT_PLUGIN
from vllm_plugin.front_end import FrontEnd
from vllm_plugin.keeper import Keeper
from vllm_plugin.registration import Registration, gather_facts, identity
from vllm_plugin.settings import PluginSettings, migration_requested
from vllm_plugin.warmup import warm_up

__all__ = ["MigrationEndpoints", "create"]

logger = logging.getLogger("vllm.vllm_hi")

Seconds = Annotated[float, msgspec.Meta(ge=1, le=600)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Peer(msgspec.Struct, forbid_unknown_fields=True):
    vllm_hi_id: Name
    host: Name
    control_port: Port
    base_url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]+$", max_length=512)]


class Start(Call):
    peer: Peer
    lease_s: Seconds = 30.0


class Attach(Call):
    request_ids: list[Name] | None = None


class Round(Call):
    """`slow_source`: from then on the source pauses before its steps as long as it writes KV faster than it can be
    copied."""

    round: Annotated[int, msgspec.Meta(ge=0)]
    slow_source: bool = False


class Handover(Call):
    request_ids: list[Name] | None = None
    wave: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    mode: Literal["rolling", "stop_and_copy", "recompute", "staged", "queued"] = "rolling"


class Probe(msgspec.Struct, forbid_unknown_fields=True):
    """Belongs to no job: it copies some blocks to nowhere."""

    host: Name
    data_ports: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=1024)]


class Collect(Call):
    """One round by hand. The first one opens the session with `peer`, as `receive` on the target names it."""

    mode: Literal["full", "incremental"]
    peer: Peer | None = None
    request_ids: list[Name] | None = None
    lease_s: Seconds = 120.0


class Pause(Call):
    """`deadline_s`: after that the requests go on by themselves."""

    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0


class Lease(Call):
    lease_s: Seconds = 30.0


#: Path under /vllm_hi/migration/ and name of the operation in the engine -> its body.
_CALLS: dict[str, type[msgspec.Struct]] = {
    "probe": Probe,
    "start": Start,
    "attach": Attach,
    "round": Round,
    "handover": Handover,
    "lease": Lease,
    "finish": Call,
    "abort": Call,
    "activate": Call,
    "convert_to_b": Call,
    "destroy": Call,
    "collect": Collect,
    "pause": Pause,
    "resume": Call,
    "receive": Call,
}


@dataclass
class MigrationEndpoints:
    """The endpoint plugin. Without `VLLM_HI_TYPE` it adds no route."""

    settings: PluginSettings | None
    name: str = ENDPOINT_PLUGIN
    required_tasks: tuple[str, ...] | None = ("generate",)
    missing_probes: list[str] = field(default_factory=list)
    engine_core: Any = None
    registration: Registration | None = None
    front_end: FrontEnd | None = None
    keeper: Keeper | None = None
    parallel: dict[str, int] = field(default_factory=dict)

    def attach_router(self, app: FastAPI) -> None:
        if self.settings is None:
            return
        router = APIRouter(prefix="/vllm_hi", include_in_schema=False)
        self._route(router, "GET", "/status", self._status)
        self._route(router, "GET", "/requests", self._requests)
        for operation, body in _CALLS.items():
            self._route(router, "POST", f"/migration/{operation}", self._migration_call(operation, body))
        self._route(router, "POST", "/migration/instantiate", self._instantiate)
        if self.settings.enable_faults:
            self._route(router, "POST", "/faults", self._faults)
        app.include_router(router)
        app.router.lifespan_context = self._lifespan(app.router.lifespan_context)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        if self.settings is None or engine_client is None:
            return
        self.engine_core = engine_client.engine_core
        self.missing_probes = compat.missing_probes()
        self.front_end = FrontEnd(engine_client, state, args)
        facts = gather_facts(self.settings, args, engine_client.vllm_config)
        self.keeper = Keeper.from_env()
        self.parallel = {name: facts.topology[name] for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        self.registration = Registration(
            self.settings,
            facts,
            self.status,
            lambda: _listening(state),
            warm_up=partial(warm_up, engine_client),
            registered=self.keeper.registered if self.keeper else None,
        )
        if self.keeper is not None:
            self.registration.vllm_hi_id = self.keeper.vllm_hi_id

    async def status(self) -> dict[str, Any]:
        """What the engine says about itself, and who this instance is. The engine is told what only we know.

        Raises:
            CallRefused: the engine does not answer.
        """
        assert self.settings is not None
        front_end = await self.front_end.facts() if self.front_end else {}
        if self.missing_probes:
            answer = _status_without_engine(self.settings.instance_type, self.missing_probes)
        else:
            answer = await self._engine("status", {"front_end": front_end} if front_end else {})
        facts = self.registration.facts if self.registration else None
        return {
            **answer,
            **identity(),
            "adapters": list(front_end.get("adapters", ())),
            "vllm_hi_id": self.registration.vllm_hi_id if self.registration else None,
            "instance_type": self.settings.instance_type,
            "served_model_name": facts.served_model_name if facts else None,
            "engine": self._engine_state(),
        }

    def _engine_state(self) -> dict[str, Any]:
        """As of a standby (`Standby.engine`): it is up once it has warmed up and the panel knows it."""
        starting = self.keeper is not None and not self.keeper.announced
        ending = self.keeper is not None and self.keeper.ending
        return {
            "state": "stopping" if ending else "instantiating" if starting else "up",
            "percent": 95 if starting else 100,
            "phase": "warming up" if starting else "",
            "error": "",
        }

    def _lifespan(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Runs the registration while the server does, and says goodbye when it ends."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with original(app) as state:
                if self.registration is not None:
                    self.registration.start()
                telling = None
                if self.keeper is not None:
                    telling = asyncio.create_task(self.keeper.tell_when_listening(lambda: _listening(app.state)))
                try:
                    yield state
                finally:
                    if telling is not None:
                        telling.cancel()
                    if self.registration is not None:
                        # What becomes of a kept engine's instance is for the standby to say.
                        await self.registration.stop(goodbye=False if self.keeper else None)

        return lifespan

    def _route(self, router: APIRouter, method: str, path: str, handler: Handler) -> None:
        assert self.settings is not None
        router.add_api_route(path, guarded(self.settings.token, handler), methods=[method])

    async def _status(self, request: Request) -> JSONResponse:
        return JSONResponse(await self.status())

    async def _requests(self, request: Request) -> JSONResponse:
        return JSONResponse(await self._engine("requests", {}))

    async def _faults(self, request: Request) -> JSONResponse:
        body = await read_body(request)
        try:
            faults = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise bad_field(error) from error
        return JSONResponse(await self._engine("faults", faults))

    def _migration_call(self, operation: str, body_type: type[msgspec.Struct]) -> Handler:
        async def call(request: Request) -> JSONResponse:
            body = await read_body(request)
            try:
                payload = msgspec.to_builtins(msgspec.json.decode(body, type=body_type))
            except msgspec.MsgspecError as error:
                raise bad_field(error) from error
            answer = await self._engine(operation, payload)
            if operation == "receive":
                answer["peer"] |= self._address()
            # After the answer is on its way, so that the caller hears it.
            return JSONResponse(answer, background=self._afterwards(operation))

        return call

    def _afterwards(self, operation: str) -> BackgroundTask | None:
        if operation == "destroy":
            if self.keeper is not None:
                self.keeper.destroyed()
            return BackgroundTask(end_server)
        cold = self.settings is not None and self.settings.standby == "cold"
        if operation == "convert_to_b" and cold and self.keeper is not None:
            return BackgroundTask(self.keeper.put_down)
        return None

    async def _instantiate(self, request: Request) -> JSONResponse:
        """The engine is up: only what is already so can be wished."""
        try:
            wish = msgspec.json.decode(await read_body(request), type=Instantiate)
        except msgspec.MsgspecError as error:
            raise bad_field(error) from error
        if self.keeper is not None and self.keeper.ending:
            raise CallRefused(409, "engine_busy", "The engine is just being put down: try again.")
        for name, real in self.parallel.items():
            wished = getattr(wish, name)
            if wished not in (None, real):
                raise CallRefused(409, "engine_up", f"The engine is up with {name} {real}, not {wished}.", name)
        return JSONResponse({"engine": self._engine_state()})

    def _address(self) -> dict[str, Any]:
        """What a source has to know of this instance beside its control port."""
        facts = self.registration.facts if self.registration else None
        return {
            "vllm_hi_id": (self.registration.vllm_hi_id if self.registration else None) or "by-hand",
            "base_url": f"http://{facts.ip}:{facts.port}" if facts else None,
        }

    async def _engine(self, operation: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Runs an operation of the plugin's half in the engine core and returns its answer.

        Raises:
            CallRefused: with the engine's own error; 501 `migration_unsupported`; 503 `engine_unavailable`.
        """
        if self.missing_probes:
            raise CallRefused(
                501,
                "migration_unsupported",
                f"This version of vLLM lacks {self.missing_probes[0]}, which migration needs: "
                "use a version that the plugin supports.",
                self.missing_probes[0],
            )
        if self.engine_core is None:
            raise CallRefused(503, "engine_unavailable", "The engine is not ready yet: try again.")
        try:
            answer = await self.engine_core.call_utility_async(compat.ENGINE_UTILITY, operation, payload)
        except Exception as failure:
            # Whatever the engine or the way to it raised: the details belong into the log, not to the caller.
            logger.warning("vLLM-HI: the engine failed at %s: %r", operation, failure)
            raise CallRefused(
                503, "engine_unavailable", f"The engine could not run {operation!r}: see the log of the instance."
            ) from failure
        if error := answer.get("error"):
            raise CallRefused(error.get("status", 500), error["code"], error["message"], error.get("param"))
        result: dict[str, Any] = answer["ok"]
        return result


def create() -> MigrationEndpoints:
    """Entry point of `vllm.endpoint_plugins`.

    Raises:
        ValueError: names the variable that is missing or wrong, and the remedy.
    """
    return MigrationEndpoints(PluginSettings.from_env() if migration_requested() else None)


def end_server() -> None:
    """Ends `vllm serve` as its own stop signal does: requests, engine and workers are shut down in order."""
    # With several API servers the signal is for their parent, which stops all of them.
    target = os.getpid() if multiprocessing.parent_process() is None else os.getppid()
    logger.info("vLLM-HI: this instance was asked to destroy itself")
    os.kill(target, signal.SIGTERM)


def _status_without_engine(instance_type: str, missing_probes: list[str]) -> dict[str, Any]:
    return {
        "role": "active" if instance_type == "A" else "standby",
        "migration": {"supported": False, "missing_probes": missing_probes},
        "factors": {},
        "kv": {},
        "requests": {},
        "data_port": 0,
        "control_port": 0,
        "session": None,
    }


def _listening(state: State) -> bool:
    """True as soon as the server accepts connections; vLLM leaves its uvicorn server in the state."""
    return bool(getattr(getattr(state, "server", None), "started", False))
