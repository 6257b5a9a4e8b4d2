"""Migrations to a standby without an engine: it gets one first, or nothing has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from instances.models import Instance
from migrations_app import instantiation, selectors, services
from migrations_app.models import MigrationJob
from migrations_app.preflight import run_preflight
from migrations_app.wishes import Wishes
from tests.integration.carried_out import SWAPPED, active, assert_rolled_back, carry_out
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, Dead, FakeInstance, Refusal

STEPS: list[Body] = [
    {"state": "instantiating", "percent": 15, "phase": "starting the workers", "error": ""},
    {"state": "instantiating", "percent": 30, "phase": "loading weights", "error": ""},
    {"state": "instantiating", "percent": 55, "phase": "loading weights", "error": ""},
    {"state": "up", "percent": 100, "phase": "", "error": ""},
]


class Engine:
    """Gives a fake instance an engine that is to be brought up: each status is one of `steps` further."""

    def __init__(self, fake: FakeInstance, steps: list[Body]) -> None:
        self.state: Body = {"state": "down", "percent": 0, "phase": "", "error": ""}
        self.steps = list(steps)
        self.wishes: list[Body] = []
        self.aborted = False
        self._fake = fake
        self._status = fake.do_status
        fake.do_status = self.status  # type: ignore[method-assign]
        fake.do_instantiate = self.instantiate  # type: ignore[attr-defined]
        fake.do_abort = self.abort  # type: ignore[method-assign]

    def instantiate(self, body: Body) -> Body:
        self.wishes.append(body)
        self.state = {"state": "instantiating", "percent": 0, "phase": "starting vLLM", "error": ""}
        return {"engine": self.state}

    def status(self, body: Body) -> Body:
        if self.state["state"] == "instantiating" and self.steps:
            self.state = self.steps.pop(0)
        return self._status(body) | {"engine": self.state}

    def abort(self, _: Body) -> Body:
        self.aborted = True
        self.state = {"state": "down", "percent": 0, "phase": "", "error": ""}
        return {"released": 0}


@pytest.fixture
def cold(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """B has no engine yet, A two requests."""
    monkeypatch.setattr(instantiation, "POLL_S", 0.02)
    monkeypatch.setattr(instantiation, "SOURCE_LOOK_S", 0.02)
    monkeypatch.setattr(instantiation, "SILENCE_S", 0.5)
    monkeypatch.setattr(instantiation, "BUSY_S", 0.5)
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    arguments = {"dtype": "float32", "block_size": 16}
    Instance.objects.filter(pk="hi-a").update(inference_params={"num_attention_heads": 4, "engine_args": arguments})
    Instance.objects.filter(pk="hi-b").update(engine={"state": "down"})
    return Engine(pair.b, STEPS)


def messages(job: MigrationJob) -> list[str]:
    return list(job.events.order_by("seq").values_list("message", flat=True))


def test_the_engine_comes_up_first_and_then_everything_moves(pair: Pair, cold: Engine) -> None:
    job = carry_out(pair.job(target_tp=2, target_gpu_memory_utilization=0.5))
    assert (job.state, job.moved_requests, job.error) == ("done", 2, "")
    [wish] = cold.wishes
    assert (wish["tensor_parallel_size"], wish["pipeline_parallel_size"], wish["model"]) == (2, None, None)
    assert wish["gpu_memory_utilization"] == 0.5
    assert wish["engine_args"] == {"dtype": "float32", "block_size": 16}
    assert pair.roles() == SWAPPED
    steps = [entry["step"] for entry in selectors.seed_status(job)["step_history"]]
    assert steps[:4] == ["validate", "b_instantiate", "b_instantiate_done", "full_transfer"]
    told = [text for text in messages(job) if "instantiating" in text]
    assert told == [
        "hi-b is instantiating, 15 %: starting the workers",
        "hi-b is instantiating, 30 %: loading weights",
        "hi-b is instantiating, 55 %: loading weights",
    ]
    # Compared once there is something to compare.
    assert {check["name"] for check in job.preflight["checks"]} >= {"dtype", "transport", "kv_capacity"}


def test_a_target_that_has_one_is_not_asked(pair: Pair, cold: Engine) -> None:
    cold.state = STEPS[-1]
    job = carry_out(pair.job())
    assert (job.state, cold.wishes) == ("done", [])


def test_a_model_of_its_own(pair: Pair, cold: Engine) -> None:
    carry_out(pair.job(target_model="org/other"))
    assert cold.wishes[0]["model"] == "org/other"


def test_the_served_name_is_no_other_model(pair: Pair, cold: Engine) -> None:
    carry_out(pair.job(target_model="smollm2"))
    assert cold.wishes[0]["model"] is None


def test_an_engine_that_does_not_come_up(pair: Pair, cold: Engine) -> None:
    error = "The engine did not come up: CUDA out of memory. Give it a device with more free memory."
    cold.steps = [STEPS[0], {"state": "down", "percent": 0, "phase": "", "error": error}]
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "instantiate_failed")
    assert job.error.startswith(f"hi-b could not bring its engine up: {error[:-1]}; all requests stayed on hi-a")
    # Nothing was frozen, nothing was attached, nothing was routed elsewhere.
    assert {name for name, _ in pair.a.calls} <= {"status", "requests", "abort"}
    assert active() == ["hi-a"]


def test_a_target_that_refuses(pair: Pair, cold: Engine) -> None:
    def refuse(_: Body) -> None:
        raise Refusal(400, "bad_field", "engine_args.dtype: it says no.")

    pair.b.faults["instantiate"] = refuse
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "bad_field")


def test_a_target_that_is_still_ending_another_engine(pair: Pair, cold: Engine) -> None:
    tries: list[int] = []

    def busy(_: Body) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise Refusal(409, "engine_busy", "The engine of an earlier start is just ending.")

    pair.b.faults["instantiate"] = busy
    assert carry_out(pair.job()).state == "done"
    assert len(tries) == 3


def test_a_port_that_changes_hands_may_be_silent_for_a_moment(pair: Pair, cold: Engine) -> None:
    silent: list[int] = []

    def reset(_: Body) -> None:
        if cold.wishes and len(silent) < 3:
            silent.append(1)
            raise Dead

    pair.b.faults["status"] = reset
    assert carry_out(pair.job()).state == "done"
    assert len(silent) == 3


def once_asked(cold: Engine, act: Callable[[], object]) -> None:
    """Does something as soon as the target has been asked to instantiate."""

    def wait() -> None:
        while not cold.wishes:
            time.sleep(0.01)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_a_target_that_dies_while_it_instantiates(pair: Pair, cold: Engine) -> None:
    cold.steps = [STEPS[0]]
    once_asked(cold, pair.b.stop)
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "target_unreachable")


def test_a_source_that_dies_while_the_target_instantiates(pair: Pair, cold: Engine) -> None:
    cold.steps = [STEPS[0]]
    once_asked(cold, pair.a.stop)
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("failed", "source_unreachable")
    assert cold.aborted
    assert pair.roles()["hi-b"] == ("standby", "B", False)
    assert not MigrationJob.objects.live_with("hi-a", "hi-b").exists()


def test_an_abort_while_the_target_instantiates(pair: Pair, cold: Engine) -> None:
    cold.steps = [STEPS[0]]
    job = pair.job()

    def abort() -> None:
        time.sleep(0.3)
        services.request_abort(MigrationJob.objects.get(id=job.id))

    aborting = threading.Thread(target=abort)
    aborting.start()
    job = carry_out(job)
    aborting.join()
    assert (job.state, cold.aborted) == ("aborted", True)
    assert set(pair.a.requests) == {"r1", "r2"}


def test_an_engine_that_never_comes_up(pair: Pair, cold: Engine, settings: Any, monkeypatch: Any) -> None:
    settings.VLLM_HI_INSTANTIATE_DEADLINE_S = 0.2
    monkeypatch.setattr(instantiation, "MARGIN_S", 0.1)
    cold.steps = [STEPS[0]]
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "instantiate_deadline")
    assert cold.wishes[0]["deadline_s"] == 0.2
    assert cold.aborted


def test_an_engine_that_does_not_fit_is_found_out_before_anything_moves(pair: Pair, cold: Engine) -> None:
    pair.b.factors["dtype"] = "bfloat16"
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "preflight_dtype")


def test_the_preflight_of_a_target_without_an_engine(pair: Pair, cold: Engine) -> None:
    source, target = Instance.objects.get(pk="hi-a"), Instance.objects.get(pk="hi-b")
    checks = {check.name: check for check in run_preflight(source, target).checks}
    assert (checks["target_engine"].level, checks["target_engine"].target_value) == (
        "ok", "brought up first, TP 1, PP 1",
    )  # fmt: skip
    found = run_preflight(source, target, wishes=Wishes(tp=3))
    problem = found.first_error()
    assert problem is not None
    assert (problem.name, problem.source_value) == ("heads_not_divisible", "4 attention heads")
    assert not cold.wishes
