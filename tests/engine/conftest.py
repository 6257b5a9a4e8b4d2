"""The real product, started once for all engine tests: broker, panel, worker, and two vLLM instances on this CPU.

Tests get it as `stack`. It lives on an event loop of its own in a background thread, so that synchronous and
asynchronous tests can use it alike. Logs stay in `test-artifacts/engine/logs`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from benchmarks.demo_models import chat_model
from benchmarks.exactness import Verdict, verdicts
from benchmarks.live_migration import Migration, MigrationRun, Panel, migrate_under_load
from benchmarks.streams import Answer, Request, mixed_requests, run_requests
from controlplane.serving import Instance, InstanceOptions
from controlplane.supervisor import ROOT, Stack, StackOptions
from tests.engine.request_filters import RULE

Result = TypeVar("Result")

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
#: Another folder and other ports let a run go beside another one (benchmarks/versions.py).
FOLDER = Path(os.environ.get("VLLM_HI_TEST_FOLDER") or ROOT / "test-artifacts")
FIRST_PORT = int(os.environ.get("VLLM_HI_TEST_PORT") or 8100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # The first test also pays for starting two engines.
            item.add_marker(pytest.mark.timeout(600))


class Load:
    """Requests under way: `live` fills up with what their clients have received."""

    def __init__(self) -> None:
        self.live: list[Answer] = []
        self.future: Future[list[Answer]] = Future()

    def result(self, limit_s: float) -> list[Answer]:
        return self.future.result(limit_s)

    def cancel(self) -> None:
        """All clients leave."""
        self.future.cancel()


class RunningStack:
    """The running product, seen from a test.

    Attributes:
        url, api_token, join_token: the panel's base URL, the operator's bearer token, the instances' secret.
        model: served model name.
    """

    def __init__(
        self,
        state_dir: Path,
        options: InstanceOptions,
        first_port: int = FIRST_PORT,
        target: InstanceOptions | None = None,
    ) -> None:
        self.model = options.served_model_name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)
        self._thread.start()
        self.stack = Stack(
            StackOptions(
                state_dir=state_dir,
                panel_port=first_port + 2,
                first_instance_port=first_port,
                first_data_port=first_port + 1000,
                instances=options,
                instance_b=target,
                say=lambda line: sys.stderr.write(line + "\n"),
            )
        )

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def api_token(self) -> str:
        return self.stack.api_token

    @property
    def join_token(self) -> str:
        return self.stack.join_token

    def wait(self, work: Coroutine[Any, Any, Result], limit_s: float = 500) -> Result:
        """Runs a coroutine on the stack's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    def start(self) -> None:
        self.wait(self.stack.start())

    def close(self) -> None:
        self.wait(self.stack.stop(), 60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # -- who is who ----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Our two instances as the panel's API lists them."""
        ours = {instance.id for instance in self.stack.instances.values()}
        answer = self.get("/api/v1/instances")
        rows = answer["results"] if isinstance(answer, dict) else answer
        return [row for row in rows if row["vllm_hi_id"] in ours]

    def active(self) -> Instance:
        """The instance that serves now."""
        return self._with_status("active")

    def standby(self) -> Instance:
        """The instance that a migration can move to now."""
        return self._with_status("standby")

    def _with_status(self, status: str) -> Instance:
        rows = self.rows()
        ids = [row["vllm_hi_id"] for row in rows if row["status"] == status]
        assert len(ids) == 1, f"expected one {status} instance: {[(row['vllm_hi_id'], row['status']) for row in rows]}"
        return next(instance for instance in self.stack.instances.values() if instance.id == ids[0])

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """GET on the panel with the operator's token; fails the test on anything but 200."""
        answer = httpx.get(self.url + path, headers=self.bearer(self.api_token), timeout=10, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST on the panel with the operator's token."""
        headers = self.bearer(self.api_token)
        return httpx.post(self.url + path, json=body, headers=headers, timeout=30, trust_env=False)

    def instance_get(self, instance: Instance, path: str) -> Any:
        """GET on an instance's own endpoints with the join token."""
        headers = self.bearer(self.join_token)
        answer = httpx.get(instance.base_url + path, headers=headers, timeout=10, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def instance_post(self, instance: Instance, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = self.bearer(self.join_token)
        return httpx.post(instance.base_url + path, json=body, headers=headers, timeout=30, trust_env=False)

    @staticmethod
    def bearer(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    # -- load ----------------------------------------------------------------------------------------------------------

    def run(self, requests: list[Request]) -> list[Answer]:
        """Runs requests undisturbed, all at once."""
        return self.wait(run_requests(self.url, self.model, requests))

    def load(self, requests: list[Request], tokens: int = 15) -> Load:
        """Starts requests and returns when every streamed one has delivered `tokens` tokens."""
        load = Load()
        work = run_requests(self.url, self.model, requests, progress=lambda answers: setattr(load, "live", answers))
        load.future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self.until(
            lambda: (
                bool(load.live) and all(len(a.token_ids) >= tokens or a.error for a in load.live if a.request.streamed)
            )
        )
        return load

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts a coroutine on the stack's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def migrate(self, source: Instance, target: Instance, **fields: Any) -> str:
        """Starts a migration by the API and returns its id."""
        answer = self.post("/api/v1/migrations", {"source": source.id, "target": target.id, **fields})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def compared(self, references: list[Answer], answers: list[Answer], migration: Migration) -> list[Verdict]:
        return verdicts(references, answers, migration.requests)

    def migrate_under_load(self, requests: list[Request], **options: Any) -> MigrationRun:
        """Moves everything from the active instance to the standby while `requests` run, and compares."""
        source, target = self.active().id, self.standby().id
        return self.wait(migrate_under_load(self.url, self.api_token, self.model, source, target, requests, **options))

    def finished(self, job_id: str) -> Migration:
        """Waits for the end of a migration that a test started itself."""

        async def wait() -> Migration:
            import aiohttp

            async with aiohttp.ClientSession(self.url, headers=self.bearer(self.api_token)) as session:
                return await Panel(session).finished(job_id)

        return self.wait(wait())

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Polls until the condition holds. The limit is for what never happens, not a measurement."""
        ends_at = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < ends_at, "it did not happen"
            time.sleep(0.05)

    # -- instances -----------------------------------------------------------------------------------------------------

    def remember_roles(self) -> tuple[Instance, Instance]:
        """Waits until one instance is active and the other a standby; returns them."""

        def settled() -> bool:
            return sorted(row["status"] for row in self.rows()) == ["active", "standby"]

        self.until(settled)
        return self.active(), self.standby()

    def status(self, instance: Instance) -> dict[str, Any]:
        status: dict[str, Any] = self.instance_get(instance, "/vllm_hi/status")
        return status

    def streams_on(self, instance: Instance) -> set[str]:
        """Stream ids of what runs on an instance."""
        rows = self.instance_get(instance, "/vllm_hi/requests")["requests"]
        return {row["stream_id"] for row in rows if row["status"] != "PARKED"}

    def free_blocks(self, instance: Instance) -> int:
        return int(self.status(instance)["kv"]["free_blocks"])

    @contextmanager
    def faults(self, instance: Instance, **faults: float | bool) -> Iterator[None]:
        """Lets an instance misbehave in named ways (vllm_plugin/faults.py) for as long as the block runs."""
        answer = self.instance_post(instance, "/vllm_hi/faults", faults)
        assert answer.status_code == 200, answer.text
        try:
            yield
        finally:
            if instance.process.running:
                self.instance_post(instance, "/vllm_hi/faults", {})

    # -- accidents -----------------------------------------------------------------------------------------------------

    def kill(self, instance: Instance) -> None:
        """Kills an instance and all its processes, as the kernel would."""
        instance.process.kill_family()
        self.wait(instance.process.wait(), 30)

    def restart(self, instance: Instance) -> None:
        """Starts a killed instance again on its ports and waits until it has registered."""
        self.wait(self.stack.restart_instance(instance.letter))


@contextmanager
def running_stack(name: str, port: int, *instances: InstanceOptions) -> Iterator[RunningStack]:
    """Starts a product of its own in a folder of that name: one kind of instances for A and B, or one for each."""
    state_dir = FOLDER / name
    shutil.rmtree(state_dir, ignore_errors=True)
    state_dir.mkdir(parents=True)
    running = RunningStack(state_dir, instances[0], port, *instances[1:])
    try:
        running.start()
        # The first steps of an engine are slower than all later ones.
        running.run(mixed_requests(2, tokens=12, salt=1))
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def stack() -> Iterator[RunningStack]:
    # The instances find the tests' request filter, which lets everything move until a test says otherwise.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["VLLM_HI_REQUEST_FILTER"] = "tests.engine.request_filters.Switchable"
    os.environ[RULE] = str(FOLDER / "request-filter.json")
    options = InstanceOptions(model=str(chat_model()), served_model_name=MODEL, faults=True)
    with running_stack("engine", FIRST_PORT, options) as running:
        yield running
