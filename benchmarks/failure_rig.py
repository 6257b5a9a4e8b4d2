"""The running product as the failure table needs it: two slow instances, clients that can leave, things that can die.

Everything is a real process started by the supervisor. A migration is held in one state by the test switches of
`vllm_plugin/faults.py`; what fails then really fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.answers import Answer, Request
from benchmarks.live_migration import TERMINAL
from benchmarks.streams import run_requests
from controlplane.serving import Instance, InstanceOptions
from controlplane.supervisor import Stack, StackOptions

__all__ = ["LEASE_S", "REFERENCE_S", "Client", "NeverHappened", "Rig", "environment"]

#: Seconds. The leases of this rig, shorter than an operator's so that the table is done in minutes.
LEASE_S = 8.0
#: Seconds. For what never happens; nothing is measured by it.
GIVE_UP_S = 90.0
RESTART_S = 300.0
#: An undisturbed run of the largest load, on the slowest machine.
REFERENCE_S = 1800.0
MODEL = "failures"
_IDLE = ("running", "waiting", "parked", "frozen", "quarantined")


class NeverHappened(Exception):
    """Something that had to come did not; the text says what."""


@dataclass
class Client:
    """One client with one request; `answer` fills up while it is served."""

    request: Request
    task: asyncio.Task[list[Answer]]
    live: list[Answer]
    left: bool = False

    @property
    def answer(self) -> Answer:
        return self.live[0] if self.live else Answer(self.request)

    def leave(self) -> None:
        """Closes the connection in the middle of the answer."""
        self.left = True
        self.task.cancel()


def environment() -> dict[str, str]:
    """What the product's processes are started with: short leases, one wave, vLLM's calls for developers."""
    return {
        "VLLM_HI_JOB_LEASE_S": str(LEASE_S),
        "VLLM_HI_JOB_RENEW_S": "2",
        "VLLM_HI_SESSION_LEASE_S": str(LEASE_S),
        "VLLM_HI_DRAIN_DEADLINE_S": "60",
        "VLLM_HI_HANDOVER_WAVE": "32",
        # For /reset_prefix_cache: it preempts what runs, and fails while anybody holds a block.
        "VLLM_SERVER_DEV_MODE": "1",
    }


@dataclass
class Rig:
    """`step_delay_s`: seconds that each step of an engine takes longer during a cell; without them a small model has
    said everything before it is moved. `references`: undisturbed answers by request body. `clients_url`: where clients
    go, the panel's own address by default."""

    stack: Stack
    http: httpx.AsyncClient
    model: str = MODEL
    clients_url: str = ""
    step_delay_s: float = 0.015
    references: dict[str, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients_url = self.clients_url or self.stack.url

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        folder: Path,
        model: str,
        first_port: int,
        say: Callable[[str], None],
        kv_cache_bytes: int,
        *,
        max_num_seqs: int = 32,
        variables: dict[str, str] | None = None,
        own_proxy: bool = False,
    ) -> AsyncIterator[Rig]:
        """`variables`: what the product's processes are started with, those of `environment()` by default. `own_proxy`:
        clients go to a proxy in a process of its own."""
        os.environ.update(environment() if variables is None else variables)
        instances = InstanceOptions(
            model=model, served_model_name=MODEL, faults=True, kv_cache_bytes=kv_cache_bytes, max_num_seqs=max_num_seqs
        )
        options = StackOptions(
            state_dir=folder,
            panel_port=first_port + 2,
            first_instance_port=first_port,
            first_data_port=first_port + 50,
            instances=instances,
            say=say,
        )
        stack = Stack(options)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=30, trust_env=False, verify=False, limits=limits) as http:
            try:
                await stack.start()
                rig = cls(stack, http)
                if own_proxy:
                    await rig.start_proxy(first_port + 3)
                yield rig
            finally:
                await stack.stop()

    async def start_proxy(self, port: int) -> None:
        """Starts a proxy beside the panel, which ends with everything else; clients go there from now on."""
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "proxy.asgi:application",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        await self.stack.run_beside("proxy", [*command, "--log-level", "warning", "--no-access-log"])
        self.clients_url = f"http://127.0.0.1:{port}"

        async def ready() -> bool:
            await self.http.get(self.clients_url + "/v1/models")
            return all([len((await self.status(one))["proxies"]) > 1 for one in self.stack.instances.values()])

        await self.until(ready, "the proxy's connections to both instances")

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def panel(self, method: str, path: str, body: Any = None) -> Any:
        """Calls the panel's API as the operator. Raises: NeverHappened with the answer when it is an error."""
        headers = {"Authorization": f"Bearer {self.stack.api_token}"}
        answer = await self.http.request(method, self.stack.url + path, json=body, headers=headers)
        if answer.status_code >= 300:
            raise NeverHappened(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    async def instance(self, instance: Instance, path: str, body: Any = None) -> Any:
        """Calls an instance's own endpoints: GET without a body, else POST."""
        headers = {"Authorization": f"Bearer {self.stack.join_token}"}
        method = "GET" if body is None else "POST"
        answer = await self.http.request(method, instance.base_url + path, json=body, headers=headers)
        return answer.json() if answer.content else {}

    async def status(self, instance: Instance) -> dict[str, Any]:
        status: dict[str, Any] = await self.instance(instance, "/vllm_hi/status")
        return status

    async def free_blocks(self, instance: Instance) -> int:
        return int((await self.status(instance))["kv"]["free_blocks"])

    async def faults(self, instance: Instance, **faults: Any) -> None:
        """Sets the test switches of an instance; those that are not named are off."""
        answer = await self.instance(instance, "/vllm_hi/faults", faults)
        if "error" in answer:
            raise NeverHappened(f"faults: {answer}")

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, limit_s: float = GIVE_UP_S) -> float:
        """Polls until the condition holds; returns the seconds it took. Raises: NeverHappened."""
        began = time.monotonic()
        while True:
            try:
                if await condition():
                    return time.monotonic() - began
            except (httpx.HTTPError, OSError, KeyError, ValueError):
                pass  # Somebody is just coming up or going down.
            if time.monotonic() - began > limit_s:
                raise NeverHappened(f"{what}: not within {limit_s:g} s")
            await asyncio.sleep(0.03)

    # -- who is who ----------------------------------------------------------------------------------------------------

    async def roles(self) -> dict[str, Instance]:
        """The two instances by their status in the panel."""
        rows = (await self.panel("GET", "/api/v1/instances"))["results"]
        status = {row["vllm_hi_id"]: row["status"] for row in rows}
        return {status[instance.id]: instance for instance in self.stack.instances.values()}

    async def settled(self) -> tuple[Instance, Instance]:
        """Waits until one instance is active and the other a standby, both idle and known to the proxy."""

        async def ready() -> bool:
            if sorted(await self.roles()) != ["active", "standby"]:
                return False
            return all([await self.idle(instance) for instance in self.stack.instances.values()])

        await self.until(ready, "one active instance and one standby, both idle")
        roles = await self.roles()
        return roles["active"], roles["standby"]

    async def idle(self, instance: Instance) -> bool:
        """Nothing runs, nothing is held, no session is open."""
        status = await self.status(instance)
        return status["session"] is None and bool(status["proxies"]) and not any(map(status["requests"].get, _IDLE))

    async def forget_prefixes(self, instance: Instance) -> bool:
        """Empties the prefix cache; False when somebody still holds a block. Does nothing without vLLM's calls for
        developers."""
        return bool((await self.instance(instance, "/reset_prefix_cache", {})).get("success", True))

    # -- load ----------------------------------------------------------------------------------------------------------

    def start(self, requests: Sequence[Request]) -> list[Client]:
        clients = []
        for request in requests:
            live: list[Answer] = []
            work = run_requests(self.clients_url, self.model, [request], progress=live.extend)
            clients.append(Client(request, asyncio.create_task(work), live))
        return clients

    async def undisturbed(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to these requests when nothing happens; asked once for each request."""
        keys = [request.path + json.dumps(request.body, sort_keys=True) for request in requests]
        missing = [(key, request) for key, request in zip(keys, requests, strict=True) if key not in self.references]
        if missing:
            requests = [request for _, request in missing]
            answers = await run_requests(self.clients_url, self.model, requests, timeout_s=REFERENCE_S)
            self.references |= {key: answer for (key, _), answer in zip(missing, answers, strict=True)}
        return [self.references[key] for key in keys]

    async def occupy(self, instance: Instance, prompt_tokens: int, tokens: int) -> None:
        """One request straight to an instance's own port, past the proxy; returns at its end."""
        body = {
            "model": self.model,
            "prompt": [1000 + (time.monotonic_ns() + place) % 40000 for place in range(prompt_tokens)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        try:
            await self.http.post(instance.base_url + "/v1/completions", json=body, timeout=300)
        except httpx.HTTPError:
            return  # The instance was killed.

    # -- migrations ----------------------------------------------------------------------------------------------------

    async def migrate(self, source: Instance, target: Instance, **fields: Any) -> str:
        body = {"source": source.id, "target": target.id, "migration_type": "preserve_source", **fields}
        return str((await self.panel("POST", "/api/v1/migrations", body))["id"])

    async def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = await self.panel("GET", f"/api/v1/migrations/{job_id}")
        return job

    async def job_ended(self, job_id: str) -> dict[str, Any]:
        async def ended() -> bool:
            return (await self.job(job_id))["state"] in TERMINAL

        await self.until(ended, f"the end of migration {job_id}")
        return await self.job(job_id)

    # -- deaths --------------------------------------------------------------------------------------------------------

    async def kill(self, instance: Instance) -> None:
        """As the kernel would: all its processes at once, no goodbye."""
        instance.process.kill_family()
        await instance.process.wait()

    async def kill_service(self, name: str) -> None:
        process = self.stack.service(name)
        process.kill_family()
        await process.wait()

    async def restart_service(self, name: str) -> None:
        await self.stack.service(name).start()
        await self.stack.until_panel_ready()

    async def restart(self, instance: Instance) -> None:
        """Starts a killed instance again, in the role that the other one leaves."""
        other = next(one for one in self.stack.instances.values() if one is not instance)

        async def settled() -> bool:
            # After a heartbeat that came late it is neither for a moment.
            roles = await self.roles()
            return other in (roles.get("active"), roles.get("standby"))

        await self.until(settled, f"a role of instance {other.letter}")
        roles = await self.roles()
        command = instance.process.command
        command[command.index("--vllm-hi-type") + 1] = "B" if roles.get("active") is other else "A"
        await instance.process.start()

        async def registered() -> bool:
            return (await self.status(instance))["vllm_hi_id"] is not None

        await self.until(registered, f"instance {instance.letter} registered", RESTART_S)
