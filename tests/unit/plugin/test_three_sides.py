"""The three sides of a move, driven at random through everything that a network, a death or a cancellation can do.

The model is built from the very tables of `vllm_plugin.states`. That it would notice is shown by breaking tables and
rules on purpose: each such mutant must be found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.plugin.three_sides.network import Message, Network
from tests.unit.plugin.three_sides.proxy import Proxy
from tests.unit.plugin.three_sides.source import Move, Source
from tests.unit.plugin.three_sides.world import Violation, World
from vllm_plugin.states import PROXY, SOURCE, TARGET, Side, Step

PROFILE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=800,
    stateful_step_count=6,
    suppress_health_check=list(HealthCheck),
)
#: A search that ends with the first find, which is not shrunk.
SEARCH = settings(
    PROFILE,
    max_examples=3000,
    phases=[Phase.generate],
    print_blob=False,
    report_multiple_bugs=False,
    verbosity=Verbosity.quiet,
)

#: Where the disturbance begins: after so many messages, commands and steps of an undisturbed move. It is parked on B at
#: 11, frozen at 19, committed at 23, switched at 27.
BEGINNINGS = [*range(3, 36), *range(13, 28)]
SLOW = ["", "", "ap", "pa", "bp", "ab", "ba", "ab", "data", "data", "close1", "leg2in"]
LOST: list[tuple[str, ...]] = [
    (),
    (),
    (),
    ("Freezing",),
    ("Freezing", "CloseLeg"),
    ("Answer to Commit",),
    ("Commit",),
    ("Producing",),
    ("Switched",),
    ("Discarded", "Resolved"),
    ("Release",),
    ("LegOpened",),
]
TWICE = ["", "Expect", "OpenLeg", "Grow", "Prepare", "Commit", "Commit", "Producing", "Discarded", "Release", "Resolve"]
DEATHS = ["A dies", "B dies", "the proxy dies", "the control plane dies", "the client leaves", "the client leaves"]
TROUBLE = [
    "cut ap",
    "cut bp",
    "cut ab",
    "cut ab",
    "preempt",
    "preempt",
    "full",
    "pressure",
    "spoil",
    "finish A",
    "abort",
]


class ThreeSides(RuleBasedStateMachine):
    """`make`: builds the world, so that mutants can be driven in the same way. `beginnings`: where trouble begins."""

    make: Callable[[Network], World] = World
    beginnings: Sequence[int] = BEGINNINGS

    @initialize(
        ordered=st.booleans(),
        done=st.runner().flatmap(lambda machine: st.sampled_from(machine.beginnings)),
        slow=st.sampled_from(SLOW),
        lost=st.sampled_from(LOST),
        twice=st.sampled_from(TWICE),
        deaths=st.sampled_from([0, 1, 2]),
        hold=st.booleans(),
        queues=st.booleans(),
    )
    def begin(
        self,
        ordered: bool,
        done: int,
        slow: str,
        lost: tuple[str, ...],
        twice: str,
        deaths: int,
        hold: bool,
        queues: bool,
    ) -> None:
        self.cuts, self.deaths, self.hold = 3 - len(lost), deaths, hold
        self.world = type(self).make(Network(ordered, slow, lost, twice))
        self.world.target.queues = queues
        self.progress(done)

    def progress(self, count: int) -> None:
        for _ in range(count):
            self.world.progress()

    @rule(count=st.integers(1, 4))
    def undisturbed(self, count: int) -> None:
        self.progress(count)

    @rule(link=st.integers(0, 5), position=st.integers(0, 2), twice=st.booleans())
    def deliver(self, link: int, position: int, twice: bool) -> None:
        """Of any connection; where there is no order also any message, or the same one twice."""
        busy = self.world.network.busy()
        if busy:
            if twice:
                self.world.network.repeat(busy[link % len(busy)], position)
            self.world.deliver(busy[link % len(busy)], position)

    @rule(seconds=st.sampled_from([0.5, 0.5, 1.5, 2.5, 2.5, 4.0, 4.0, 12.0, 35.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(engine=st.sampled_from("AB"), count=st.integers(1, 3))
    def step(self, engine: str, count: int) -> None:
        for _ in range(count):
            self.world.source.step() if engine == "A" else self.world.target.step()

    @precondition(lambda self: self.deaths > 0)
    @rule(what=st.sampled_from(DEATHS), count=st.integers(0, 4))
    def die(self, what: Any, count: int) -> None:
        self.deaths -= 1
        self.world.fail(what)
        self.progress(count)

    @precondition(lambda self: self.cuts > 0)
    @rule(pair=st.sampled_from(["ap", "bp", "ab"]), count=st.integers(0, 4))
    def cut(self, pair: str, count: int) -> None:
        self.cuts -= 1
        self.world.cut(pair)
        self.progress(count)

    @rule(what=st.sampled_from(TROUBLE), count=st.integers(0, 4))
    def trouble(self, what: str, count: int) -> None:
        world = self.world
        match what:
            case "preempt":
                world.source.preempt()
            case "full":
                world.target.full = not world.target.full
            case "pressure":
                world.target.pressure()
            case "spoil":
                world.spoil_next = True
            case "finish A":
                while world.source.computes:
                    world.source.step()
            case _:
                world.command("abort")
        self.progress(count)

    @rule(kind=st.sampled_from(["attach", "round", "handover", "renew", "finish"]))
    def command(self, kind: str) -> None:
        self.world.command(kind)

    @invariant()
    def always(self) -> None:
        if hasattr(self, "world"):
            self.world.check_always()

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.violated:
            self.world.settle(self.hold)


def test_whatever_happens_the_client_has_one_whole_answer_and_nothing_is_left_behind():
    run_state_machine_as_test(ThreeSides, settings=PROFILE)


# -- the model has teeth -----------------------------------------------------------------------------------------------


def broken(side: Side, cells: str, state: str, *actions: str) -> Side:
    """The table with another step in some cells, each named `state/event`; "=": the state stays."""
    steps = dict(side.steps)
    for cell in cells.split():
        at, event = cell.split("/")
        steps[at, event] = Step(at if state == "=" else state, actions)
    return dataclasses.replace(side, steps=steps)


BACK = ("unfreeze", "close_leg", "release")


class Trusting(World):
    def client_ahead(self, have: int, replayed: int) -> bool:
        return False


class Hasty(Source):
    """Says `Release` while a copy is under way."""

    def _release(self, move: Move) -> None:
        self.world.network.send("ab", "Release", move.ticket, session=self.session)


class Generous(Proxy):
    """Feeds the client from both legs."""

    def on_leg_two(self, message: Message) -> None:
        fresh = message.kind == "token" and len(message.args["value"]) > len(self.client)
        if fresh and self.fed_by != message.ticket and self.handover(message.ticket).open:
            self._deliver(message.args["value"])
        super().on_leg_two(message)


def with_side(**sides: Any) -> Callable[[Network], World]:
    """Tables by name, or classes that replace a side."""

    def make(network: Network) -> World:
        world = World(network, **{name: side for name, side in sides.items() if isinstance(side, Side)})
        for name, side in sides.items():
            if not isinstance(side, Side):
                setattr(world, name, side(world))
        return world

    return make


def without_deadline(side: Side, *states: str) -> Side:
    return dataclasses.replace(side, deadlines={k: v for k, v in side.deadlines.items() if k not in states})


MUTANTS: dict[str, tuple[Callable[[Network], World], str]] = {
    "a lost answer is taken for a refusal": (
        with_side(source=broken(SOURCE, "sent/commit_lost", "stayed", *BACK)),
        "goes on while B owns",
    ),
    "A goes on when it loses B, without asking the proxy": (
        with_side(source=broken(SOURCE, "committed/target_lost", "stayed", *BACK)),
        "goes on while B owns",
    ),
    "an abort takes a request back that B may have": (
        with_side(source=broken(SOURCE, "sent/session_closed committed/session_closed", "stayed", *BACK)),
        "goes on while B owns",
    ),
    "a preempted request is scheduled again while B may have it": (
        with_side(source=broken(SOURCE, "sent/preempted committed/preempted", "=", "unfreeze")),
        "goes on while B owns",
    ),
    "the proxy does not look whether the client is ahead": (Trusting, "the client has"),
    "the proxy feeds the client from both legs": (with_side(proxy=Generous), "the client has"),
    "the proxy leaves leg one open": (
        with_side(proxy=broken(PROXY, "frozen/producing", "switched", "feed_from_leg_two", "tell_switched")),
        "leg one is still open",
    ),
    "the proxy gives up when leg one breaks": (
        with_side(
            proxy=broken(PROXY, "two_legs/leg_one_lost frozen/leg_one_lost", "discarded", "close_leg_two", "go_on")
        ),
        "although B owns the request",
    ),
    "a cancel does not follow the request to B": (
        with_side(proxy=broken(PROXY, "switched/client_left", "=")),
        "works for a client that has left",
    ),
    "B takes a late commit": (
        with_side(target=broken(TARGET, "parked/commit", "committed", "install", "unpin", "answer")),
        "after the end of its promise",
    ),
    "B refuses a commit that comes twice": (
        with_side(target=broken(TARGET, "committed/commit producing/commit", "=", "refuse")),
        "goes on while B owns",
    ),
    "B frees the blocks of a dropped request at once": (
        with_side(
            target=broken(TARGET, "parked/pressure parked/request_ended", "dropped", "drop", "unpin", "tell_gone")
        ),
        "blocks that B has freed",
    ),
    "A says that it does not write any more while it does": (with_side(source=Hasty), "blocks that B has freed"),
    "B keeps the blocks of a released request": (
        with_side(target=broken(TARGET, "parked/release prepared/release", "ended", "drop")),
        "blocks",
    ),
    "B forgets a parked request when the session ends": (
        with_side(target=broken(TARGET, "parked/session_closed", "=")),
        "without a session",
    ),
    "A has no last resort": (with_side(source=without_deadline(SOURCE, "sent", "committed")), "longer than"),
    "the proxy has endless patience": (with_side(proxy=without_deadline(PROXY, "frozen")), "longer than"),
}
#: The part of the move at which a mutant is looked for, if not everywhere: what it breaks happens only there.
WHERE: dict[str, Sequence[int]] = {
    "a lost answer is taken for a refusal": range(20, 26),
    "A goes on when it loses B, without asking the proxy": range(23, 27),
    "the proxy does not look whether the client is ahead": range(18, 26),
    "the proxy gives up when leg one breaks": range(21, 27),
    "a cancel does not follow the request to B": range(26, 36),
    "B takes a late commit": range(18, 24),
    "B refuses a commit that comes twice": range(20, 25),
    "B frees the blocks of a dropped request at once": range(12, 17),
    "A says that it does not write any more while it does": range(12, 22),
    "A has no last resort": range(20, 27),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_protocol_is_noticed(name: str):
    make, complaint = MUTANTS[name]
    beginnings = WHERE.get(name, BEGINNINGS)
    machine = type("Mutant", (ThreeSides,), {"make": staticmethod(make), "beginnings": beginnings})
    with pytest.raises(Violation, match=complaint):
        run_state_machine_as_test(machine, settings=SEARCH)
