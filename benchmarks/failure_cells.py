"""The rows and columns of the failure table: in which state a move is held, what then fails, what must come out.

A cell holds the moves of all clients in one state, lets one thing fail, and looks at clients and engines until all is
quiet again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.answers import Request
from benchmarks.failure_rig import Client, Rig
from benchmarks.streams import mixed_requests
from controlplane.serving import Instance

__all__ = ["FAILURES", "STATES", "TOKENS", "Failure", "Run", "State", "base_requests", "impossible"]

#: What a client must get: the whole answer, token by token that of an undisturbed run; an error in the protocol's
#: shape after a correct beginning; a broken connection.
Fate = Literal["exact", "error", "lost"]
Faults = Mapping[str, Any]

TOKENS = 1000


@dataclass
class Run:
    """One cell while it runs. `free`: free KV blocks by instance letter before it. `others`: requests that are in the
    way on purpose, past the proxy. `restarting`: a killed instance is started again at once."""

    rig: Rig
    source: Instance
    target: Instance
    job: str
    clients: list[Client]
    free: dict[str, int]
    others: list[asyncio.Task[None]] = field(default_factory=list)
    restarting: asyncio.Task[None] | None = None

    async def moves(self) -> dict[str, int]:
        """How many moves are in which state, as the source sees it."""
        session = (await self.rig.status(self.source))["session"]
        return dict(session["moves"]) if session and session["side"] == "source" else {}

    async def all_in(self, state: str) -> bool:
        return await self.moves() == {state: len(self.clients)}


@dataclass(frozen=True)
class State:
    """A place where a move can be held. `source`, `target`: faults that hold it there. `reached`: it is there."""

    name: str
    meaning: str
    reached: Callable[[Run], Awaitable[bool]]
    source: Faults = field(default_factory=dict)
    target: Faults = field(default_factory=dict)


async def _attaching(run: Run) -> bool:
    parked = (await run.rig.status(run.target))["requests"]["parked"]
    return bool(parked == len(run.clients)) and await run.all_in("attaching")


async def _copying(run: Run) -> bool:
    return await run.all_in("copying") and await run.rig.free_blocks(run.target) < run.free[run.target.letter]


async def _prepared(run: Run) -> bool:
    return (await run.rig.job(run.job))["state"] == "handing_over" and await run.all_in("copying")


def _in(state: str) -> Callable[[Run], Awaitable[bool]]:
    return lambda run: run.all_in(state)


STATES = {
    state.name: state
    for state in (
        State(
            "attaching",
            "B has parked the requests and has not said so",
            _attaching,
            target={"late": {"parked": 5.0}},
        ),
        State("copying", "between two rounds; A decodes", _copying, source={"hold_round_s": 5.0}),
        State(
            "prepared",
            "B has promised run slots, nothing is frozen yet",
            _prepared,
            source={"hold_before_freeze_s": 1.5},
        ),
        State(
            "frozen",
            "A is frozen, the tail is sent, the commit is not",
            _in("frozen"),
            source={"hold_before_commit_s": 1.5},
        ),
        State(
            "sent",
            "B has taken over and runs; neither A nor the proxy knows",
            _in("sent"),
            target={"late": {"committed": 2.0, "producing": 2.0}},
        ),
        State(
            "committed",
            "A knows that B has taken over, the proxy has not switched",
            _in("committed"),
            target={"late": {"producing": 2.0}},
        ),
        State("moved", "the proxy has switched; A still has another request", _in("moved")),
    )
}


@dataclass(frozen=True)
class Failure:
    """Something that goes wrong. `inject` makes it happen once the state is reached. `source`, `target`: faults on top
    of the state's, for what cannot be done from outside. `fates`: by state, for all clients that have not left; `exact`
    where it is not named. `kills`: what is dead afterwards. `first`: by state, how moves must end before they are tried
    again. `must`: what is wrong with the job and its request rows."""

    name: str
    inject: Callable[[Run], Awaitable[None]]
    fates: Mapping[str, Fate] = field(default_factory=dict)
    kills: Literal["", "source", "target", "proxy", "worker"] = ""
    source: Mapping[str, Faults] = field(default_factory=dict)
    target: Mapping[str, Faults] = field(default_factory=dict)
    requests: Callable[[str], list[Request]] | None = None
    first: Mapping[str, str] = field(default_factory=dict)
    must: Callable[[dict[str, Any], list[dict[str, Any]]], str] = lambda job, rows: ""

    @property
    def waits(self) -> bool:
        """It comes from outside, once the state is reached; otherwise the faults themselves are the failure."""
        return self.inject is not _nothing

    def fate(self, state: str) -> Fate:
        return self.fates.get(state, self.fates.get("", "exact"))


def base_requests(tokens: int) -> list[Request]:
    """Greedy, seeded, penalised, and a non-streamed one: one wave."""
    return mixed_requests(3, tokens=tokens, salt=700, whole=1)


async def _nothing(_run: Run) -> None:
    return


async def _kill_target(run: Run) -> None:
    await run.rig.kill(run.target)


async def _restart_target(run: Run) -> None:
    await run.rig.kill(run.target)
    run.restarting = asyncio.create_task(run.rig.restart(run.target))


async def _kill_source(run: Run) -> None:
    await run.rig.kill(run.source)


async def _kill_proxy(run: Run) -> None:
    await run.rig.kill_service("panel")


async def _kill_worker(run: Run) -> None:
    await run.rig.kill_service("worker")


async def _abort(run: Run) -> None:
    await run.rig.panel("POST", f"/api/v1/migrations/{run.job}/abort", {})


async def _abort_at_instances(run: Run) -> None:
    """As the reaper does it: with the next attempt, in the middle of whatever the instances do."""
    attempt = (await run.rig.job(run.job))["attempt"] + 1
    body = {"job": run.job, "attempt": attempt}
    for instance in (run.source, run.target):
        await run.rig.instance(instance, "/vllm_hi/migration/abort", body)


async def _one_leaves(run: Run) -> None:
    run.clients[0].leave()


async def _all_leave(run: Run) -> None:
    for client in run.clients:
        client.leave()


async def _fill_target(run: Run) -> None:
    """Requests past the proxy take all blocks of B that are still free."""
    size = (await run.rig.status(run.target))["kv"]["block_size"]

    async def full() -> bool:
        free = await run.rig.free_blocks(run.target)
        if free <= 1:
            return True
        # A prompt that takes what is free, and steps enough to keep it.
        length = min(free, 10) * size - size // 2
        run.others.append(asyncio.create_task(run.rig.occupy(run.target, length, 600)))
        await asyncio.sleep(0.3)
        return False

    await run.rig.until(full, "no free block on B", 20)


async def _preempt(run: Run) -> None:
    """vLLM's own call: preempts everything that runs on A and empties its prefix cache."""
    await run.rig.instance(run.source, "/reset_prefix_cache?reset_running_requests=true", {})


def _ending() -> list[Request]:
    """Requests that end one after the other around the freeze, and one that does not end."""
    short = [request for length in range(30, 130, 6) for request in mixed_requests(1, tokens=length, salt=length)]
    return [*short, *mixed_requests(1, tokens=TOKENS, salt=701)]


def _short_ones(state: str) -> list[Request]:
    """The first ends while the others wait for their handover; at the freeze, one ends in every other step."""
    if state == "frozen":
        return _ending()
    return [*mixed_requests(1, tokens=120, salt=702), *mixed_requests(2, tokens=TOKENS, salt=703)]


def _one_ended(_job: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    outcomes = [row["outcome"] for row in rows]
    return "" if "finished" in outcomes else f"no request ended while it was on its way: {outcomes}"


FAILURES = {
    failure.name: failure
    for failure in (
        Failure("B killed", _kill_target, {"moved": "error"}, "target"),
        Failure("B restarted", _restart_target, kills="target"),
        Failure(
            "A killed", _kill_source, {"": "error", "sent": "exact", "committed": "exact", "moved": "exact"}, "source"
        ),
        Failure("proxy killed", _kill_proxy, {"": "lost"}, "proxy"),
        Failure("control plane killed", _kill_worker, kills="worker"),
        Failure("operator aborts", _abort),
        Failure("abort at both instances", _abort_at_instances),
        Failure("one client leaves", _one_leaves),
        Failure("all clients leave", _all_leave),
        Failure(
            "B full",
            _fill_target,
            source={"copying": {"hold_round_s": 10.0}},
            target={"attaching": {"late": {"parked": 8.0}}},
        ),
        Failure(
            "B refuses the commit",
            _nothing,
            target={"sent": {"refuse_commit": True, "late": {"committed": 1.0}}},
            # B takes a commit for 2 s after its promise.
            source={"frozen": {"hold_before_commit_s": 2.5}},
            first={"frozen": "stayed", "sent": "stayed"},
        ),
        Failure(
            "answer lost",
            _nothing,
            target={
                "attaching": {"late": {"parked": -1}},
                "copying": {"late": {"grown": -1}},
                "prepared": {"late": {"prepared": -1}},
                "sent": {"late": {"committed": -1}},
                "committed": {"late": {"producing": -1}},
            },
            # Where B has said that it runs the request, the proxy knows.
            first={
                "attaching": "stayed",
                "copying": "stayed",
                "prepared": "stayed",
                "sent": "moved",
                "committed": "stayed",
            },
        ),
        Failure(
            "answer and notice lost",
            _nothing,
            target={"sent": {"late": {"committed": -1, "producing": -1}}},
            first={"sent": "stayed"},
        ),
        Failure("A preempts", _preempt),
        Failure(
            "a request ends",
            _nothing,
            requests=_short_ones,
            source={"copying": {"hold_round_s": 10.0}, "prepared": {"hold_before_freeze_s": 6.0}},
            target={"attaching": {"late": {"parked": 8.0}}, "frozen": {"late": {"prepared": 1.0}}},
            must=_one_ended,
        ),
    )
}

_NO_QUESTION = "B owes no answer in this state"
_PROMISED = "blocks and run slots are promised since *prepared*; that cell shows that the promise holds"
_ORDINARY = "an ordinary request of B from here on"
_NOT_ON_A = "A does not compute the request any more"
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("frozen", "B full"): _PROMISED,
    ("sent", "B full"): _PROMISED,
    ("committed", "B full"): _ORDINARY,
    ("moved", "B full"): _ORDINARY,
    ("frozen", "answer lost"): _NO_QUESTION,
    ("moved", "answer lost"): "the proxy's notice to A follows the close of leg one, which A sees by itself",
    ("moved", "A preempts"): _NOT_ON_A,
    ("sent", "a request ends"): _NOT_ON_A,
    ("committed", "a request ends"): _NOT_ON_A,
    ("moved", "a request ends"): _NOT_ON_A,
}


def impossible(state: str, failure: str) -> str:
    """Why a cell makes no sense; "" when it does."""
    if (state, failure) in IMPOSSIBLE:
        return IMPOSSIBLE[state, failure]
    if failure == "B restarted" and state not in ("copying", "sent"):
        return "as *B killed*: a session ends with its process, whatever starts afterwards"
    if failure == "B refuses the commit" and state not in ("frozen", "sent"):
        return "there is no commit to refuse yet" if state in ("attaching", "copying", "prepared") else "already taken"
    if failure == "answer and notice lost" and state != "sent":
        return "the answer and the notice are both open in *sent* only"
    return ""
