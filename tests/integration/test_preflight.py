"""The pre-flight check against instances that answer over real HTTP."""

from __future__ import annotations

import pytest

from instances.models import Instance
from migrations_app.preflight import Preflight, run_preflight
from migrations_app.tasks import execute
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, Refusal

NO_WAY = "the way to the target could not be measured: NIXL cannot be used: no backend starts."


def checked(mode: str = "rolling") -> Preflight:
    return run_preflight(*Instance.objects.order_by("pk"), mode)


def no_way(_: Body) -> None:
    raise Refusal(502, "target_unreachable", NO_WAY)


def test_the_way_is_shown_with_its_speed(pair: Pair) -> None:
    preflight = checked()
    assert preflight.ok
    (way,) = [check for check in preflight.checks if check.name == "transport"]
    assert (way.source_value, way.level) == ("memory, 5.00 GB/s", "ok")


def test_without_a_way_only_what_is_computed_again_can_move(pair: Pair) -> None:
    pair.a.faults["probe"] = no_way
    for mode in ("rolling", "atomic", "stop_and_copy"):
        problem = checked(mode).first_error()
        assert problem is not None
        assert problem.name == "transport"
        assert NO_WAY in problem.remedy
        assert "VLLM_HI_TRANSFER_BACKEND" in problem.remedy
    preflight = checked("recompute")
    assert preflight.level == "warning"


@pytest.mark.parametrize(("mode", "state"), [("rolling", "failed"), ("recompute", "done")])
def test_a_job_looks_at_its_own_mode(mode: str, state: str, pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.faults["probe"] = no_way
    job = pair.job(mode=mode)
    execute.run(str(job.id))
    job.refresh_from_db()
    assert job.state == state
    assert job.error_code == ("preflight_transport" if state == "failed" else "")
    assert bool(pair.a.named("start")) == (state == "done")
