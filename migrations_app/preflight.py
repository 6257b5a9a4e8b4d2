"""What is compared before a migration starts, factor by factor, and what it will probably cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from django.conf import settings

from instances.client import InstanceClient, InstanceError
from instances.models import Instance
from migrations_app.choices import HandoverMode
from migrations_app.instantiation import engine_of
from migrations_app.prediction import Estimate, estimate_cost
from migrations_app.room import Room, choose, sizes
from migrations_app.selection import Selection
from migrations_app.selection_checks import filter_check, selection_check
from migrations_app.wishes import Wishes, problem, shown
from vllm_plugin.compatibility import Check, Level, compare

__all__ = ["Check", "Preflight", "run_preflight"]


@dataclass(frozen=True)
class Preflight:
    checks: list[Check] = field(default_factory=list)
    estimate: Estimate | None = None

    @property
    def level(self) -> Level:
        """The worst level of all checks."""
        levels = {check.level for check in self.checks}
        return "error" if "error" in levels else "warning" if "warning" in levels else "ok"

    @property
    def ok(self) -> bool:
        return self.level != "error"

    def first_error(self) -> Check | None:
        return next((check for check in self.checks if check.level == "error"), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "checks": [asdict(check) for check in self.checks],
            "estimate": asdict(self.estimate) if self.estimate else None,
        }


def run_preflight(
    source: Instance,
    target: Instance,
    mode: str = HandoverMode.ROLLING,
    wishes: Wishes | None = None,
    *,
    selection: Selection | None = None,
    drain_deadline_s: float | None = None,
) -> Preflight:
    """Asks both instances and compares. Changes nothing; an instance that does not answer is an error in the list.

    Args:
        drain_deadline_s: as for the job; None: as the settings say.
    """
    if drain_deadline_s is None:
        drain_deadline_s = settings.VLLM_HI_DRAIN_DEADLINE_S
    checks: list[Check] = []
    statuses: list[dict[str, Any] | None] = []
    requests: list[dict[str, Any]] = []
    on_target: list[dict[str, Any]] = []
    for side, instance in (("source", source), ("target", target)):
        try:
            with InstanceClient.of(instance) as client:
                statuses.append(client.status())
                if side == "source":
                    requests = client.requests()
                else:
                    on_target = client.requests()
            answer: tuple[Level, str] = ("ok", "")
        except InstanceError as error:
            statuses.append(None)
            answer = ("error", f"{error.message} Check its process and its log.")
        shown = "answers" if answer[0] == "ok" else "no answer"
        checks.append(
            Check(
                f"{side}_reachable",
                shown if side == "source" else "",
                shown if side == "target" else "",
                answer[0],
                answer[1],
            )
        )
    left, right = statuses
    checks.append(_equal("served_model_name", source.served_model_name, target.served_model_name))
    if left is None or right is None:
        return Preflight(checks)
    checks += [_support("source", left), _support("target", right)]
    if engine_of(right)["state"] != "up":
        checks += _without_engine(source, target, wishes or Wishes(), right)
        return Preflight(checks, estimate_cost(requests, left.get("kv") or {}))
    checks += compare(left.get("factors") or {}, right.get("factors") or {})
    if selection is not None:
        checks += selection_check(requests, selection)
        requests = [row for row in requests if selection.matches(row)]
    checks += filter_check(left, requests)
    way, probe = _way(source, right, mode)
    estimate = estimate_cost(requests, left.get("kv") or {}, probe)
    movable = [row for row in requests if row.get("migratable")]
    checks += [way, _convergence(estimate), _capacity(movable, right, on_target, drain_deadline_s)]
    stuck = [row for row in requests if not row.get("migratable")]
    if stuck:
        reason = (stuck[0].get("reason") or {}).get("message", "no reason given")
        checks.append(
            Check(
                "migratable_requests",
                f"{len(requests) - len(stuck)} of {len(requests)}",
                "",
                "warning",
                f"{len(stuck)} cannot move ({reason}); the source waits for them up to {drain_deadline_s:g} s.",
            )
        )
    return Preflight(checks, estimate)


def _without_engine(source: Instance, target: Instance, wishes: Wishes, status: Mapping[str, Any]) -> list[Check]:
    """What can be said of a target whose engine is still to be brought up. The migration compares the rest after it."""
    wrong = problem(source, target, wishes)
    if wrong is not None:
        return [Check(wrong.code, wrong.source_value, wrong.target_value, "error", wrong.message)]
    error = str(engine_of(dict(status)).get("error") or "")
    sizes = f"brought up first, {shown(source, target, wishes)}"
    remedy = f"Its last start failed: {error}" if error else ""
    return [Check("target_engine", "up", sizes, "warning" if error else "ok", remedy)]


def _equal(name: str, left: object, right: object) -> Check:
    if left == right:
        return Check(name, _show(left), _show(right), "ok")
    return Check(name, _show(left), _show(right), "error", f"Both instances need the same {name.replace('_', ' ')}.")


def _support(side: str, status: Mapping[str, Any]) -> Check:
    migration = status.get("migration") or {}
    supported = bool(migration.get("supported"))
    missing = ", ".join(str(probe) for probe in migration.get("missing_probes") or [])
    values = (("yes" if supported else f"no: {missing}"), "")
    source_value, target_value = values if side == "source" else values[::-1]
    remedy = "" if supported else f"This vLLM release lacks what the plugin needs ({missing}); install a supported one."
    return Check(f"{side}_supports_migration", source_value, target_value, "ok" if supported else "error", remedy)


def _way(source: Instance, target: Mapping[str, Any], mode: str) -> tuple[Check, dict[str, Any] | None]:
    """Which transport KV would take, and how fast it was just now. Without one only what is computed again can move."""
    try:
        with InstanceClient.of(source) as client:
            probe = client.probe(str(target.get("data_host") or ""), list(target.get("data_ports") or []))
    except InstanceError as error:
        if mode == HandoverMode.RECOMPUTE:
            why = f"No KV travels in this mode, and none could: {error}"
            return Check("transport", "none", "", "warning", why), None
        remedy = (
            f"{error} Open the target's data ports, name another VLLM_HI_TRANSFER_BACKEND on both instances, or let "
            "the target compute the KV again (mode recompute)."
        )
        return Check("transport", "none", "", "error", remedy), None
    shown = f"{probe.get('transport')}, {float(probe.get('bytes_per_s') or 0) / 1e9:.2f} GB/s"
    # Why it is no faster one is worth knowing, and no reason to worry.
    return Check("transport", shown, str(probe.get("reason") or ""), "ok"), probe


def _convergence(estimate: Estimate) -> Check:
    written, way = f"{estimate.dirty_bytes_per_s / 1e6:.1f} MB/s", f"{estimate.bytes_per_s / 1e6:.1f} MB/s"
    if estimate.converges:
        return Check("convergence", f"writes {written}", f"takes {way}", "ok")
    remedy = (
        "KV is written faster than it can be copied, so the rounds do not get smaller: slow the source down (mode "
        "slowed), compute the KV again on the target (mode recompute), accept long pauses, or wait for less load."
    )
    return Check("convergence", f"writes {written}", f"takes {way}", "warning", remedy)


def _capacity(
    rows: Sequence[dict[str, Any]], target: Mapping[str, Any], on_target: Sequence[dict[str, Any]], deadline_s: float
) -> Check:
    """Whether all requests fit at once, and if not, what will happen."""
    room = Room.of(target, on_target)
    now, most = sizes(rows, room.block_size)
    held = f"{_count(len(rows), 'request')} hold {now} blocks now, {most} at most"
    free = f"{room.free} of {room.total} blocks free"
    if room.slots < len(rows):
        free += f", {room.slots:g} run slots"
    chosen, left = choose(rows, room)
    if not left:
        return Check("kv_capacity", held, free, "ok")
    what = "The target has no room for any of the" if not chosen else f"About {len(chosen)} of the"
    first = f"{what} {_count(len(rows), 'request')}" + (" move at once, oldest first" if chosen else " now")
    remedy = (
        f"{first}; the rest stays on the source and follows as room appears. What is left after {deadline_s:g} s moves "
        "without room and waits on the target, its KV kept in host memory or computed again. Give the target more KV "
        "cache memory to avoid that."
    )
    return Check("kv_capacity", held, free, "warning", remedy)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _show(value: object) -> str:
    return "—" if value is None else str(value)
