"""Keeps the panel informed that this instance exists and how it is (docs/protocol.md, section 5).

Runs on the API server's event loop. vLLM serves with or without a panel: every failure here is retried for ever, with
one log line per change of state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import httpx
import psutil

from vllm_plugin import devices, engine_arguments
from vllm_plugin.settings import PluginSettings
from vllm_plugin.wire import PROTOCOL_VERSION

__all__ = ["InstanceFacts", "Registration", "gather_facts", "identity"]

logger = logging.getLogger("vllm.vllm_hi")

HEARTBEAT_S = 2.0
LISTENING_POLL_S = 0.1
PANEL_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 2.0
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 10.0)

#: A long step may keep the engine from answering: for so long the last status goes on being sent, then silence tells
#: the panel that something is wrong.
STALE_STATUS_S = 30.0

Status = dict[str, Any]


@dataclass(frozen=True)
class InstanceFacts:
    """What does not change while the server runs. `ip`, `port`: where its HTTP API can be reached."""

    ip: str
    port: int
    served_model_name: str
    inference_params: dict[str, Any]
    topology: dict[str, Any]


class PanelRefused(Exception):
    """The panel answered, but not with success."""


def identity() -> dict[str, Any]:
    """Returns which protocol and which release this plugin speaks."""
    return {"protocol_version": PROTOCOL_VERSION, "plugin_version": version("vllm-hi-panel")}


def gather_facts(settings: PluginSettings, args: Namespace, vllm_config: Any) -> InstanceFacts:
    """Collects the facts from vLLM's parsed arguments and its resolved configuration."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    names = args.served_model_name or [args.model]
    return InstanceFacts(
        # A server that listens on all interfaces is reached where our own listeners are.
        ip=settings.bind if args.host in (None, "", "0.0.0.0", "::") else args.host,
        port=args.port,
        served_model_name=names[0],
        inference_params={
            "model": args.model,
            "served_model_names": list(names),
            "max_model_len": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enforce_eager": model.enforce_eager,
            **_heads(model),
            "start_s": round(time.time() - psutil.Process().create_time(), 1),
            "engine_args": engine_arguments.reported(args, vllm_config),
        },
        topology={
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "visible_gpu_ids": devices.visible_gpu_ids(parallel.world_size),
            **devices.described(),
        },
    )


def _heads(model: Any) -> dict[str, int]:
    """What a tensor or pipeline parallel size must divide, or not exceed, as far as the model says it."""
    text = getattr(model, "hf_text_config", None)
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    found = {name: getattr(text, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}


class Registration:
    """Registers this instance, sends heartbeats, registers again where the panel has forgotten it.

    Args:
        status: asks the engine; may raise.
        listening: true as soon as the HTTP server accepts connections; nothing is announced before.
        warm_up: awaited once before the first announcement.
        registered: called each time the panel has taken the registration.
        transport: for tests; None = the network.
    """

    def __init__(
        self,
        settings: PluginSettings,
        facts: InstanceFacts,
        status: Callable[[], Awaitable[Status]],
        listening: Callable[[], bool],
        transport: httpx.AsyncBaseTransport | None = None,
        warm_up: Callable[[], Awaitable[None]] | None = None,
        registered: Callable[[], None] | None = None,
    ) -> None:
        self.facts = facts
        self.vllm_hi_id: str | None = None
        self._settings = settings
        self._status = status
        self._listening = listening
        self._warm_up = warm_up
        self._registered = registered
        self._known = False
        self._failures = 0
        self._said = ""
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[Status] | None = None
        self._last: Status | None = None
        self._last_at = 0.0
        self._panel = httpx.AsyncClient(
            base_url=settings.panel_url,
            headers={"Authorization": f"Bearer {settings.token}"},
            timeout=PANEL_TIMEOUT_S,
            trust_env=False,
            transport=transport,
        )

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="vllm-hi-registration")

    async def stop(self, goodbye: bool | None = None) -> None:
        """Ends the heartbeats and tells the panel, as far as it can be reached; by default if it knows us."""
        for task in (self._task, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._known if goodbye is None else goodbye:
            try:
                await self._post("deregister", {"vllm_hi_id": self.vllm_hi_id}, timeout=GOODBYE_TIMEOUT_S)
            except (httpx.HTTPError, PanelRefused) as error:
                logger.info("vLLM-HI: the panel did not hear that this instance stops: %r", error)
        await self._panel.aclose()

    async def _run(self) -> None:
        delay = LISTENING_POLL_S
        if self._warm_up is not None:
            await self._warm_up()
        while True:
            if self._listening():
                delay = await self._safe_tick()
            await asyncio.sleep(delay)

    async def _safe_tick(self) -> float:
        try:
            return await self._tick()
        except Exception:
            # This loop must outlive whatever a panel or an engine answers: without it the instance is lost to both.
            logger.exception("vLLM-HI: an exchange with the panel failed")
            return BACKOFF_S[-1]

    async def _tick(self) -> float:
        """One exchange with the panel; returns the seconds until the next."""
        status = await self._fresh_status()
        if status is None:
            self._say(logging.WARNING, "the engine does not answer; the panel hears nothing until it does")
            return HEARTBEAT_S
        try:
            if self._known:
                await self._heartbeat(status)
                if not self._known:
                    # It may have been told to end while the question was under way.
                    status = await self._fresh_status() or status
            if not self._known and status.get("role") != "destroyed":
                await self._register(status)
        except httpx.HTTPError:
            self._say(logging.WARNING, f"the panel at {self._settings.panel_url} does not answer; will go on trying")
        except PanelRefused as refusal:
            self._say(logging.WARNING, f"the panel at {self._settings.panel_url} refuses this instance: {refusal}")
        else:
            self._failures = 0
            self._say(logging.INFO, f"registered with the panel at {self._settings.panel_url} as {self.vllm_hi_id}")
            return HEARTBEAT_S
        backoff = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
        self._failures += 1
        # Many instances lose the same panel at the same moment; they should not all come back at the same one.
        return backoff * random.uniform(0.8, 1.2)

    async def _register(self, status: Status) -> None:
        payload = {
            **asdict(self.facts),
            **identity(),
            "instance_type": _instance_type(status, self._settings),
            "data_port": status["data_port"],
            "control_port": status["control_port"],
            "factors": status["factors"],
            "capabilities": status["migration"],
            "adapters": status["adapters"],
            "engine": status.get("engine", {}),
            "pid": os.getpid(),
        }
        if self.vllm_hi_id is not None:
            payload["vllm_hi_id"] = self.vllm_hi_id
        answer = await self._post("register", payload)
        if not answer.get("success") or not answer.get("vllm_hi_id"):
            raise PanelRefused(_reason(answer))
        self.vllm_hi_id = str(answer["vllm_hi_id"])
        self._known = True
        if self._registered is not None:
            self._registered()

    async def _heartbeat(self, status: Status) -> None:
        fields = ("role", "kv", "requests", "control_port", "factors", "adapters", "engine")
        payload = {"vllm_hi_id": self.vllm_hi_id, **{name: status[name] for name in fields if name in status}}
        if "role_held_s" in status:
            # An old status is sent again while the engine is busy; the role has been held for so much longer.
            payload["role_held_s"] = status["role_held_s"] + asyncio.get_running_loop().time() - self._last_at
        answer = await self._post("heartbeat", payload)
        self._known = answer.get("known", True) is not False

    async def _post(self, call: str, payload: dict[str, Any], timeout: float = PANEL_TIMEOUT_S) -> dict[str, Any]:
        response = await self._panel.post(f"/vllm_hi/{call}", json=payload, timeout=timeout)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PanelRefused(f"its answer to {call} (HTTP {response.status_code}) is not of this protocol")
        # An instance that the panel does not know may be told so with an error status: that is no refusal.
        if response.is_error and answer.get("known") is not False:
            raise PanelRefused(f"{_reason(answer)} (HTTP {response.status_code})")
        return answer

    async def _fresh_status(self) -> Status | None:
        """Asks the engine, with one question under way at a time; returns None where it is silent for too long."""
        loop = asyncio.get_running_loop()
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._status())
        done, _ = await asyncio.wait({self._asking}, timeout=HEARTBEAT_S)
        if done:
            question, self._asking = self._asking, None
            if question.exception() is not None:
                # The engine's shutdown answers like this, too: from now on the panel shall hear nothing.
                self._last = None
                return None
            self._last, self._last_at = question.result(), loop.time()
        elif loop.time() - self._last_at > STALE_STATUS_S:
            return None
        return self._last

    def _say(self, level: int, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            logger.log(level, "vLLM-HI: %s", sentence)


def _instance_type(status: Status, settings: PluginSettings) -> str:
    """A source that became a standby registers as B, whatever it was started as."""
    return {"active": "A", "standby": "B", "A": "A", "B": "B"}.get(status.get("role") or "", settings.instance_type)


def _reason(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("code")
    return str(error or "no reason given")
