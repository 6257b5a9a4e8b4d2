"""The first thing that a migration to a standby without an engine does: it has one brought up.

The source goes on serving, nothing is routed elsewhere or frozen yet, and whatever goes wrong ends the job with that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from django.conf import settings

from instances.client import InstanceClient, InstanceError
from migrations_app.choices import EventKind, Step
from migrations_app.events import record
from migrations_app.models import MigrationJob
from migrations_app.rollback import MigrationStopped, blame, silence
from migrations_app.wishes import of_job, problem, shown

__all__ = ["bring_up", "engine_of"]

POLL_S = 0.5
#: Seconds between two looks at the source, and how many in a row it may miss.
SOURCE_LOOK_S = 2.0
SOURCE_MISSES = 2
#: Seconds for which the target may be silent: its port changes hands, from the standby to the engine.
SILENCE_S = 10.0
#: Seconds that an engine of an earlier start has to end.
BUSY_S = 30.0
#: Beyond the standby's own deadline, seconds.
MARGIN_S = 30.0
#: Percent between two events, unless the phase changes.
EVENT_STEP = 20


def engine_of(status: dict[str, Any]) -> dict[str, Any]:
    """`{state, percent, phase, error}`; an instance that does not say has an engine."""
    engine = status.get("engine")
    return engine if isinstance(engine, dict) and engine.get("state") else {"state": "up"}


def bring_up(job: MigrationJob, attempt: int, target: InstanceClient, check: Callable[[], None]) -> None:
    """Returns when the target has an engine; at once if it has one.

    Args:
        check: called between two looks; raises when the job must not go on.

    Raises:
        MigrationStopped: it cannot have one, or the source is gone.
    """
    try:
        state = engine_of(target.status())["state"]
    except InstanceError:
        # The pre-flight check comes next, and says so.
        return
    if state == "up":
        record(job.id, EventKind.STEP, step=Step.B_INSTANTIATE, message=f"{job.target_id} has an engine")
    else:
        _Start(job, attempt, target, check).run()
    record(job.id, EventKind.STEP, step=Step.B_INSTANTIATE_DONE, message=f"{job.target_id} is ready")


class _Start:
    """One start, as the panel follows it."""

    def __init__(self, job: MigrationJob, attempt: int, target: InstanceClient, check: Callable[[], None]) -> None:
        self.job = job
        self._attempt = attempt
        self._target = target
        self._check = check
        self._silent_since: float | None = None
        self._looked_at_source = 0.0
        self._source_misses = 0
        self._said = ("", -EVENT_STEP)

    def run(self) -> None:
        job = self.job
        wrong = problem(job.source, job.target, of_job(job))
        if wrong is not None:
            raise MigrationStopped(wrong.code, wrong.message.rstrip("."))
        sizes = shown(job.source, job.target, of_job(job))
        message = f"{job.target_id} brings its engine up ({sizes})"
        record(job.id, EventKind.STEP, step=Step.B_INSTANTIATE, message=message)
        self._ask()
        ends_at = time.monotonic() + settings.VLLM_HI_INSTANTIATE_DEADLINE_S + MARGIN_S
        while True:
            engine = self.look()
            if engine["state"] == "up":
                return
            if engine["state"] in ("down", "stopping"):
                reason = str(engine.get("error") or "").rstrip(".") or "the start was ended"
                raise MigrationStopped("instantiate_failed", f"{job.target_id} could not bring its engine up: {reason}")
            self._tell(engine)
            self._source_must_answer()
            if time.monotonic() > ends_at:
                raise MigrationStopped("instantiate_deadline", f"The engine of {job.target_id} was not up in time")
            self._pause()

    def look(self) -> dict[str, Any]:
        """How far the engine is."""
        while True:
            try:
                engine = engine_of(self._target.status())
            except InstanceError as error:
                self._silent_since = self._silent_since or time.monotonic()
                if not error.gone or time.monotonic() - self._silent_since > SILENCE_S:
                    raise blame(error, self.job, "its engine was being brought up") from error
                self._pause()
            else:
                self._silent_since = None
                return engine

    def _ask(self) -> None:
        job = self.job
        wish = {
            "tensor_parallel_size": job.target_tp,
            "pipeline_parallel_size": job.target_pp,
            "gpu_memory_utilization": job.target_gpu_memory_utilization,
            "model": job.target_model if job.target_model not in ("", job.target.served_model_name) else None,
            "engine_args": job.source.inference_params.get("engine_args") or {},
            "deadline_s": settings.VLLM_HI_INSTANTIATE_DEADLINE_S,
        }
        gives_up_at = time.monotonic() + BUSY_S
        while True:
            try:
                self._target.instantiate(str(job.id), self._attempt, wish)
                return
            except InstanceError as error:
                if error.code != "engine_busy" or time.monotonic() > gives_up_at:
                    raise blame(error, job, "its engine was being brought up") from error
            self._pause()

    def _tell(self, engine: dict[str, Any]) -> None:
        """One event for each phase, and now and then one within a long phase."""
        phase, percent = str(engine.get("phase") or ""), int(engine.get("percent") or 0)
        if phase == self._said[0] and percent < self._said[1] + EVENT_STEP:
            return
        self._said = (phase, percent)
        message = f"{self.job.target_id} is instantiating, {percent} %: {phase}"
        record(self.job.id, EventKind.STEP, message=message, data={"instantiating": percent, "phase": phase})

    def _source_must_answer(self) -> None:
        now = time.monotonic()
        if now - self._looked_at_source < SOURCE_LOOK_S:
            return
        self._looked_at_source = now
        error = silence(self.job.source)
        self._source_misses = self._source_misses + 1 if error else 0
        if error is not None and self._source_misses >= SOURCE_MISSES:
            raise blame(error, self.job, "the target's engine was being brought up") from error

    def _pause(self) -> None:
        self._check()
        time.sleep(POLL_S)
