"""The move of one stream as three state machines, one per side: A (source), B (target) and the proxy worker.

Each side is a table: for every state and every event the next state and what is done, or why nothing is. The code that
moves requests follows these tables, and `tests/unit/plugin/test_three_sides.py` drives a model that is built from them
through losses, deaths and late messages. All states of B and of the proxy are those of one ticket: before it is known
there B is at `unknown` and the proxy at `one_leg`.

`python -m vllm_plugin.states` prints the tables as Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["FAULTS", "PROXY", "SIDES", "SOURCE", "TARGET", "Deadline", "Side", "Step", "markdown"]

#: Who ends a state that lasts too long: the side itself, the session's lease (both ends keep it), or the proxy.
Keeper = Literal["own", "lease", "proxy"]


class Step(NamedTuple):
    """`why`: the reason, when nothing is done."""

    state: str
    actions: tuple[str, ...] = ()
    why: str = ""


class Deadline(NamedTuple):
    """How long a state may last. A lease counts from its last renewal."""

    seconds: float
    keeper: Keeper


@dataclass(frozen=True)
class Side:
    """`resting`: states in which nothing is held for the move, so that none needs a deadline; those without a way out
    are terminal."""

    name: str
    initial: str
    states: Mapping[str, str]
    events: Mapping[str, str]
    steps: Mapping[tuple[str, str], Step]
    deadlines: Mapping[str, Deadline]
    resting: frozenset[str]

    def successors(self) -> dict[str, frozenset[str]]:
        """Returns which states may follow each state."""
        return {
            state: frozenset(step.state for (at, _), step in self.steps.items() if at == state) - {state}
            for state in self.states
        }

    def terminal(self) -> frozenset[str]:
        return frozenset(state for state, after in self.successors().items() if not after)

    def own_deadlines(self) -> dict[str, float]:
        """Returns seconds by state, for the states that the side's own clock ends."""
        return {state: deadline.seconds for state, deadline in self.deadlines.items() if deadline.keeper == "own"}


#: (events, states, next state, actions or the reason why nothing is done). Names are separated by blanks. "=": the
#: state stays. "*" as event: every event that no other row of the table has for that state.
_Row = tuple[str, str, str, tuple[str, ...] | str]


def _side(
    name: str,
    states: Mapping[str, str],
    events: Mapping[str, str],
    rows: Iterable[_Row],
    deadlines: Mapping[str, Deadline],
    resting: str,
) -> Side:
    steps: dict[tuple[str, str], Step] = {}
    wildcards: list[tuple[str, str]] = []
    for row_events, row_states, after, done in rows:
        for state in row_states.split():
            if row_events == "*":
                wildcards.append((state, str(done)))
                continue
            for event in row_events.split():
                if (state, event) in steps or state not in states or event not in events:
                    raise ValueError(f"{name}: a second row, or a wrong name, at {state} and {event}")
                to = state if after == "=" else after
                steps[state, event] = Step(to, (), done) if isinstance(done, str) else Step(to, done)
    for state, why in wildcards:
        for event in events:
            steps.setdefault((state, event), Step(state, (), why))
    return Side(name, next(iter(states)), states, events, steps, deadlines, frozenset(resting.split()))


LEASE_S = 30.0  #: A session's lease unless the job asks for another one; renewed by the job and by every message to B.
ATTACH_S = 15.0  #: B's front end queues and tokenizes meanwhile; 5 s for `Expect`, 10 s for the leg.
FREEZE_S = 1.0  #: The client feels it; nothing is lost by going on.
LONG_FREEZE_S = 2.5  #: The same where all KV is copied meanwhile (`stop_and_copy`); shorter than the proxy's patience.
LAST_RESORT_S = 10.0  #: Much longer than B's commit deadline and the proxy's patience together.
COMMIT_S = 2.0  #: How long a promised run slot waits for its commit.
PATIENCE_S = 3.0  #: How long the proxy lets a frozen stream be silent.
RECOMPUTE_PATIENCE_S = 30.0  #: The same where B computes the whole context first; A's last resort moves along.
ORPHAN_S = 10.0  #: How long it waits for B when leg one is lost: there is nothing to go back to.
LEG_S = 600.0  #: A second leg that nobody speaks of any more; the longest lease that a job may ask for.

# -- A -----------------------------------------------------------------------------------------------------------------

_BACK = ("unfreeze", "close_leg", "release")
_OPEN = "attaching copying frozen sent committed"
_ONLY_THE_PROXY = "once the tail is sent only the proxy decides; it sees both legs"
_LATE = "late or repeated; it was decided without it"

SOURCE = _side(
    "A",
    {
        "attaching": "B's leg is being opened",
        "copying": "parked on B, rounds run, A decodes",
        "frozen": "A does not schedule it",
        "sent": "B may have everything, its answer is open",
        "committed": "B has accepted",
        "moved": "the proxy has switched",
        "stayed": "rolled back, A goes on",
        "finished": "it ended by itself on A",
    },
    {
        "attached": "`LegOpened(ok)` and `Parked(ok)` are both there",
        "leg_refused": "`LegOpened(no)`, or the proxy was lost or silent while it was asked",
        "parked_gone": "`Parked(no)`: B refused or revoked it, or its leg was closed",
        "refused": "B refuses `Grow` or `Prepare`: blocks, run slots, grammar",
        "target_lost": "the connection to B is lost, a push failed, or `Grow` or `Prepare` was not answered",
        "request_ended": "a look at the scheduler: the request has ended here",
        "preempted": "a look at the scheduler: its blocks are gone",
        "no_proxy": "no connection to the owning proxy worker when the handover begins",
        "freeze": "the handover begins; B has promised a run slot",
        "no_tail": "window too small, step not drained, or a random state that cannot be read",
        "tail_sent": "B has all blocks",
        "accepted": "`Refusals` to the commit without this ticket",
        "commit_refused": "`Refusals` to the commit with this ticket",
        "commit_lost": "no answer to the commit: the connection was lost, or 2.5 s have passed",
        "switched": "`Switched` or `Resolved(switched)`",
        "discarded": "`Discarded` or `Resolved(discarded)`",
        "discarded_ended": "the same, and the request has ended here",
        "proxy_lost": "the control connection of the owning proxy worker is lost",
        "session_closed": "operator abort, finish, a newer attempt, or the lease is over (control plane dead)",
        "settled": "4 s after `session_closed` the move is still open",
        "timeout": "the deadline of the state has passed",
    },
    [
        ("attached", "attaching", "copying", ()),
        ("attached", "copying frozen sent committed", "=", _LATE),
        ("leg_refused proxy_lost", "attaching", "stayed", _BACK),
        ("leg_refused", "copying frozen sent committed", "=", _LATE),
        ("proxy_lost", "copying", "=", "it may come back; a handover asks for it"),
        ("proxy_lost", "frozen sent committed", "=", "the deadline of the state bounds it"),
        ("parked_gone target_lost", "attaching copying frozen", "stayed", _BACK),
        ("parked_gone", "sent committed", "=", _ONLY_THE_PROXY),
        ("target_lost", "sent", "=", "the open commit fails with it: `commit_lost`"),
        ("target_lost", "committed", "=", _ONLY_THE_PROXY),
        ("refused", "attaching copying frozen", "stayed", _BACK),
        ("refused", "sent committed", "=", _LATE),
        ("request_ended", "attaching copying frozen", "finished", _BACK),
        ("request_ended", "sent committed", "=", _ONLY_THE_PROXY),
        ("preempted", "attaching copying frozen", "stayed", _BACK),
        ("preempted", "sent committed", "=", ("keep_held",)),
        ("no_proxy", "copying", "stayed", _BACK),
        ("no_proxy", "attaching frozen sent committed", "=", "asked only when a handover begins"),
        ("freeze", "copying", "frozen", ("tell_freezing", "freeze")),
        ("freeze", "attaching frozen sent committed", "=", _LATE),
        ("no_tail", "frozen", "stayed", _BACK),
        ("no_tail", "attaching copying sent committed", "=", _LATE),
        ("tail_sent", "frozen", "sent", ("commit",)),
        ("tail_sent", "attaching copying sent committed", "=", _LATE),
        ("accepted", "sent", "committed", ()),
        ("commit_refused", "sent", "stayed", _BACK),
        ("commit_lost", "sent", "=", ("ask_proxy",)),
        ("accepted commit_refused commit_lost", "attaching copying frozen committed", "=", _LATE),
        ("switched", "sent committed", "moved", ("end_request",)),
        ("switched", "attaching copying frozen", "=", "B was not given the request yet"),
        ("discarded", _OPEN, "stayed", _BACK),
        ("discarded_ended", _OPEN, "finished", _BACK),
        ("session_closed", "attaching copying frozen", "stayed", _BACK),
        ("session_closed", "sent committed", "=", ("settle",)),
        ("settled", "sent committed", "stayed", _BACK),
        ("settled", "attaching copying frozen", "=", "they are rolled back at once"),
        ("timeout", _OPEN, "stayed", _BACK),
        ("*", "moved stayed finished", "=", "its fate is known"),
    ],
    {
        "attaching": Deadline(ATTACH_S, "own"),
        "copying": Deadline(LEASE_S, "lease"),
        "frozen": Deadline(FREEZE_S, "own"),
        "sent": Deadline(LAST_RESORT_S, "own"),
        "committed": Deadline(LAST_RESORT_S, "own"),
    },
    "moved stayed finished",
)

# -- B -----------------------------------------------------------------------------------------------------------------

_HERS = "an ordinary request of B: its leg decides"
_NOT_THERE = "it has not arrived, or has gone"

TARGET = _side(
    "B",
    {
        "unknown": "A has not spoken of the ticket",
        "expected": "A has, its leg has not arrived",
        "parked": "all members are here, blocks are held round by round, nothing is scheduled",
        "prepared": "parked, with a promised run slot",
        "committed": "resumed here, before its first step",
        "producing": "it has made a step here, or waits in the queue: it is B's for good",
        "dropped": "ended, but A may still write into its blocks",
        "ended": "nothing is held",
    },
    {
        "expect": "`Expect`",
        "arrived": "all members of the leg are in the scheduler and are as expected",
        "arrived_bad": "a member comes that was not expected: other prompt, sampling, stream or number",
        "grow": "`Grow`, and there is room",
        "grow_full": "`Grow`, and there are not enough blocks",
        "prepare": "`Prepare`, and a run slot is free, or none is asked for",
        "prepare_full": "`Prepare`, and none is, or the grammar is not ready",
        "commit": "`Commit`, and it fits",
        "commit_queued": "`Commit` of what was promised a place in the queue, and it fits",
        "commit_bad": "`Commit`, and it does not fit what is parked, or the grammar rejects it",
        "release": "`Release`: A does not write under the ticket any more",
        "pressure": "running requests need the blocks",
        "first_step": "the first step with it is done, or it has ended before one",
        "request_ended": "it has ended: its leg was closed, a stop string in the replay, or by itself",
        "proxy_back": "the owning proxy worker has connected (again)",
        "session_closed": "`CloseSession`, abort, connection to A lost, a newer attempt, or the lease is over",
        "timeout": "the deadline of the state has passed",
    },
    [
        ("expect", "unknown", "expected", ()),
        ("expect", "expected parked prepared committed producing dropped ended", "=", "said before"),
        ("arrived", "expected", "parked", ("tell_parked",)),
        ("arrived_bad", "expected", "ended", ("refuse_arrival", "tell_gone")),
        ("arrived arrived_bad", "unknown parked prepared committed producing dropped ended", "=", ("refuse_arrival",)),
        ("grow", "parked prepared", "=", ("hold_blocks", "answer")),
        ("grow_full", "parked prepared", "=", ("refuse",)),
        ("grow grow_full prepare prepare_full", "unknown expected committed producing dropped ended", "=", ("refuse",)),
        ("prepare", "parked prepared", "prepared", ("answer",)),
        ("prepare_full", "parked prepared", "=", ("refuse",)),
        ("commit", "prepared", "committed", ("install", "unpin", "answer")),
        ("commit_queued", "prepared", "producing", ("install", "unpin", "answer", "tell_producing")),
        ("commit commit_queued", "parked", "=", ("refuse",)),
        ("commit_bad", "parked prepared", "=", ("refuse",)),
        ("commit commit_queued commit_bad", "committed producing", "=", ("answer",)),
        ("commit commit_queued commit_bad", "unknown expected dropped ended", "=", ("refuse",)),
        ("release", "unknown expected", "ended", ()),
        ("release", "parked prepared", "ended", ("drop", "unpin")),
        ("release", "dropped", "ended", ("unpin",)),
        ("release", "committed producing", "=", _HERS),
        ("pressure", "parked", "dropped", ("drop", "tell_gone")),
        ("pressure", "prepared", "=", "a run slot is promised"),
        ("pressure", "unknown expected dropped", "=", "it holds nothing that could be given up"),
        ("pressure", "committed producing", "=", _HERS),
        ("first_step", "committed", "producing", ("tell_producing",)),
        ("first_step", "producing", "=", "told before"),
        ("first_step", "unknown expected parked prepared dropped", "=", "nothing is scheduled under the ticket"),
        ("request_ended", "parked prepared", "dropped", ("tell_gone",)),
        ("request_ended", "committed", "ended", ("tell_producing", "free")),
        ("request_ended", "producing", "ended", ("free",)),
        ("request_ended", "unknown expected dropped", "=", _NOT_THERE),
        ("proxy_back", "producing", "=", ("tell_producing",)),
        ("proxy_back", "unknown expected parked prepared committed dropped", "=", "there is nothing to say yet"),
        ("session_closed", "unknown", "=", "A has not spoken of it"),
        ("session_closed timeout", "expected", "ended", ()),
        ("session_closed timeout", "parked", "ended", ("drop", "revoke", "unpin")),
        ("session_closed", "prepared", "ended", ("drop", "revoke", "unpin")),
        ("session_closed timeout", "dropped", "ended", ("revoke", "unpin")),
        ("session_closed", "committed producing", "=", _HERS),
        ("timeout", "prepared", "parked", ()),
        ("timeout", "committed", "=", "the proxy's patience closes its leg"),
        ("timeout", "unknown producing", "=", "nothing is held for the move"),
        ("*", "ended", "=", "it is over"),
    ],
    {
        "expected": Deadline(LEASE_S, "lease"),
        "parked": Deadline(LEASE_S, "lease"),
        "prepared": Deadline(COMMIT_S, "own"),
        "committed": Deadline(PATIENCE_S, "proxy"),
        "dropped": Deadline(LEASE_S, "lease"),
    },
    "unknown producing ended",
)

# -- proxy -------------------------------------------------------------------------------------------------------------

_DISCARD = ("close_leg_two", "tell_discarded", "go_on")
_NO_LEG = "there is no second leg under the ticket"
_OVER = "the handover was decided"

PROXY = _side(
    "proxy",
    {
        "one_leg": "no leg was opened for the ticket",
        "two_legs": "leg two is open, the client is fed by leg one",
        "frozen": "the same, and B may own the stream already",
        "orphaned": "leg one is lost: the stream is B's, or nobody's",
        "switched": "the client is fed by leg two, leg one is closed",
        "discarded": "leg two is closed",
    },
    {
        "open_leg": "`OpenLeg`",
        "open_refused": "`OpenLeg`, but the request cannot move, another second leg is open, or B is not connected",
        "leg_written": "the request of leg two is written",
        "freezing": "`Freezing`",
        "producing": "`Producing(n)`, and the client has at most n tokens",
        "producing_behind": "`Producing(n)`, and the client has more: A had resumed",
        "close_leg": "`CloseLeg`",
        "resolve": "`Resolve`",
        "leg_two_lost": "leg two cannot be opened, breaks, or is answered with an error",
        "leg_two_complete": "leg two's answer is complete",
        "leg_one_finished": "the client has every finish reason from leg one",
        "leg_one_lost": "leg one breaks (A is dead)",
        "client_left": "the client's connection is closed",
        "control_lost": "the control connection to A or B is lost",
        "timeout": "the deadline of the state has passed",
    },
    [
        ("open_leg", "one_leg", "two_legs", ("open_leg_two",)),
        ("open_leg", "two_legs frozen orphaned", "=", ("answer_opened",)),
        ("open_leg open_refused", "switched discarded", "=", ("refuse_leg",)),
        ("open_refused", "one_leg two_legs frozen orphaned", "=", ("refuse_leg",)),
        ("leg_written", "two_legs frozen orphaned", "=", ("answer_opened",)),
        ("leg_written", "one_leg", "=", _NO_LEG),
        ("freezing", "two_legs frozen", "frozen", ("start_patience",)),
        ("freezing", "orphaned", "=", "leg one is lost, and B has longer than the patience already"),
        ("freezing", "one_leg", "=", _NO_LEG),
        ("producing", "two_legs frozen orphaned", "switched", ("close_leg_one", "feed_from_leg_two", "tell_switched")),
        ("producing_behind", "two_legs frozen orphaned", "discarded", _DISCARD),
        ("producing producing_behind", "one_leg", "=", _NO_LEG),
        ("close_leg", "two_legs frozen orphaned", "discarded", ("close_leg_two", "go_on")),
        ("close_leg", "one_leg", "=", _NO_LEG),
        ("resolve", "two_legs frozen orphaned", "discarded", ("close_leg_two", "answer_discarded", "go_on")),
        ("resolve", "switched", "=", ("answer_switched",)),
        ("resolve", "one_leg discarded", "=", ("answer_discarded",)),
        ("leg_two_lost", "two_legs frozen orphaned", "discarded", _DISCARD),
        ("leg_two_complete", "two_legs", "discarded", _DISCARD),
        ("leg_two_complete", "frozen orphaned", "=", "B's notice comes on another connection"),
        ("leg_two_lost leg_two_complete", "one_leg", "=", _NO_LEG),
        ("leg_one_finished", "two_legs frozen orphaned", "discarded", _DISCARD),
        ("leg_one_lost", "two_legs frozen", "orphaned", ("start_patience",)),
        ("leg_one_lost", "orphaned", "=", "it is lost already"),
        ("leg_one_finished", "one_leg", "=", _NO_LEG),
        ("leg_one_lost", "one_leg discarded", "=", ("fail_client",)),
        ("client_left", "two_legs frozen orphaned", "discarded", ("close_leg_one", "close_leg_two", "tell_discarded")),
        ("client_left", "one_leg switched discarded", "=", ("close_fed_leg",)),
        ("leg_two_lost", "switched", "=", ("fail_client",)),
        (
            *("control_lost", "one_leg two_legs frozen orphaned", "="),
            "it is dialled again; messages wait, and deadlines go on",
        ),
        ("timeout", "two_legs frozen orphaned", "discarded", _DISCARD),
        ("timeout", "one_leg", "=", _NO_LEG),
        ("*", "switched discarded", "=", _OVER),
    ],
    {"two_legs": Deadline(LEG_S, "own"), "frozen": Deadline(PATIENCE_S, "own"), "orphaned": Deadline(ORPHAN_S, "own")},
    "one_leg switched discarded",
)

SIDES = (SOURCE, TARGET, PROXY)

#: What each death or cancellation raises on the sides that live on: events by side, of which each state takes its own.
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {
    "A dies": {"B": ("session_closed",), "proxy": ("control_lost", "leg_one_lost")},
    "B dies": {"A": ("target_lost", "commit_lost"), "proxy": ("control_lost", "leg_two_lost")},
    "the proxy dies": {"A": ("proxy_lost", "request_ended"), "B": ("request_ended",)},
    "the control plane dies": {"A": ("session_closed",), "B": ("session_closed",)},
    "the operator aborts": {"A": ("session_closed", "settled"), "B": ("session_closed",)},
    "the client leaves": {
        "A": ("request_ended", "discarded_ended"),
        "B": ("request_ended",),
        "proxy": ("client_left",),
    },
}


def markdown() -> str:
    """Returns the tables as Markdown, one per side: rows are states, each with its events."""
    lines: list[str] = []
    for side in SIDES:
        lines += [
            f"## {side.name}",
            "",
            "| state | meaning | deadline | event | next | done |",
            "|---|---|---|---|---|---|",
        ]
        for state, meaning in side.states.items():
            deadline = side.deadlines.get(state)
            limit = f"{deadline.seconds:g} s ({deadline.keeper})" if deadline is not None else "none needed"
            for event in side.events:
                step = side.steps[state, event]
                to = step.state if step.state != state else "stays"
                done = ", ".join(step.actions) or (f"nothing: {step.why}" if step.why else "")
                lines.append(f"| {state} | {meaning} | {limit} | {event} | {to} | {done} |")
                meaning = limit = ""
        lines += ["", *(f"- `{event}`: {text}." for event, text in side.events.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
