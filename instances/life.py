"""What an instance is doing, in one word for people: its status, and how far its engine is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instances.choices import STATUS_TONES, InstanceStatus

if TYPE_CHECKING:
    from instances.models import Instance

__all__ = ["engine_state", "needs_engine", "shown_state", "shown_tone"]

#: While it is one of these, whether it has an engine is what people want to know.
_STANDING_BY = frozenset({InstanceStatus.STANDBY, InstanceStatus.MIGRATING})


def engine_state(instance: Instance) -> str:
    """`down`, `instantiating`, `up` or `stopping`; `up` for one that does not say, which has always had one."""
    return str(instance.engine.get("state") or "up")


def needs_engine(instance: Instance) -> bool:
    """True for a standby that has no engine: a migration to it brings one up first."""
    return engine_state(instance) != "up"


def shown_state(instance: Instance) -> str:
    """`standby` (no engine), `instantiating 40 %`, `ready` (a standby with an engine), `active`, `draining`, or what
    else its status is."""
    state = engine_state(instance)
    if instance.status in _STANDING_BY and state == "instantiating":
        return f"instantiating {_percent(instance)} %"
    if instance.status == InstanceStatus.STANDBY:
        return "ready" if state == "up" else "standby"
    return str(instance.status)


def shown_tone(instance: Instance) -> str:
    """Tone of the badge."""
    if shown_state(instance).startswith("instantiating"):
        return "busy"
    return STATUS_TONES.get(instance.status, "muted")


def _percent(instance: Instance) -> int:
    value = instance.engine.get("percent")
    return int(value) if isinstance(value, (int, float)) else 0
