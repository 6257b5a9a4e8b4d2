"""The transition table, and `advance` against it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from instances.models import Instance
from migrations_app.choices import LIVE_STATES, TERMINAL_STATES, EventKind, MigrationState
from migrations_app.events import record
from migrations_app.models import AppendOnlyError, MigrationEvent, MigrationJob
from migrations_app.state import TRANSITIONS, IllegalTransitionError, advance
from tests.unit.panel.factories import make_job, make_pair

S = MigrationState


def test_the_table_covers_every_state_and_ends_nowhere_else() -> None:
    assert set(TRANSITIONS) == set(MigrationState)
    assert all(not TRANSITIONS[state] for state in TERMINAL_STATES)
    # From every live state there is a way to fail; the reaper relies on it.
    assert all(S.FAILED in TRANSITIONS[state] for state in LIVE_STATES)


def test_every_state_can_be_reached() -> None:
    reached, todo = {S.PENDING}, [S.PENDING]
    while todo:
        for state in TRANSITIONS[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(MigrationState)


@pytest.mark.django_db
@pytest.mark.parametrize("from_", list(MigrationState))
@pytest.mark.parametrize("to", list(MigrationState))
def test_advance_follows_the_table(from_: MigrationState, to: MigrationState) -> None:
    job = make_job()
    MigrationJob.objects.filter(id=job.id).update(state=from_)
    before = job.events.count()
    if to in TRANSITIONS[from_]:
        assert advance(job.id, from_, to)
        expected, added = to, 1
    else:
        with pytest.raises(IllegalTransitionError):
            advance(job.id, from_, to)
        expected, added = from_, 0
    job.refresh_from_db()
    assert job.state == expected
    assert job.events.count() == before + added
    assert (job.finished_at is not None) == (added == 1 and to in TERMINAL_STATES)


@pytest.mark.django_db
def test_advance_from_another_state_changes_nothing() -> None:
    job = make_job()
    assert not advance(job.id, S.COPYING, S.HANDING_OVER, error="must not be written")
    job.refresh_from_db()
    assert (job.state, job.error, job.events.count()) == (S.PENDING, "", 1)


@pytest.mark.django_db
def test_advance_for_another_owner_changes_nothing() -> None:
    job = make_job()
    MigrationJob.objects.filter(id=job.id).update(state=S.COPYING, owner="one")
    assert not advance(job.id, S.COPYING, S.HANDING_OVER, held_by="two")
    assert advance(job.id, S.COPYING, S.HANDING_OVER, held_by="one")


@pytest.mark.django_db
def test_events_are_numbered_without_a_hole() -> None:
    job = make_job()
    for _ in range(4):
        record(job.id, EventKind.STEP, message="x")
    advance(job.id, S.PENDING, S.PREFLIGHT)
    assert list(job.events.values_list("seq", flat=True)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.django_db
def test_events_cannot_be_changed_or_removed() -> None:
    event = record(make_job().id, EventKind.STEP, message="as it was")
    event.message = "as it was not"
    with pytest.raises(AppendOnlyError):
        event.save()
    with pytest.raises(AppendOnlyError):
        event.delete()
    with pytest.raises(AppendOnlyError):
        MigrationEvent.objects.all().delete()
    with pytest.raises(AppendOnlyError):
        MigrationEvent.objects.update(message="as it was not")
    assert MigrationEvent.objects.get(pk=event.pk).message == "as it was"


class JobMachine(RuleBasedStateMachine):
    """Random moves, legal or not, by two owners: the job follows the table and the trail tells its whole life."""

    def __init__(self) -> None:
        super().__init__()
        MigrationJob.objects.update(state=S.FAILED)
        source, target = Instance.objects.get(pk="hi-a"), Instance.objects.get(pk="hi-b")
        self.job = MigrationJob.objects.create(source=source, target=target, owner="one")
        self.state = S.PENDING
        self.states: list[str] = []

    @rule(
        from_=st.sampled_from(list(MigrationState)),
        to=st.sampled_from(list(MigrationState)),
        owner=st.sampled_from(["one", "two"]),
    )
    def move(self, from_: MigrationState, to: MigrationState, owner: str) -> None:
        try:
            moved = advance(self.job.id, from_, to, held_by=owner)
        except IllegalTransitionError:
            assert to not in TRANSITIONS[from_]
            return
        assert moved == (from_ == self.state and owner == "one")
        if moved:
            self.state = to
            self.states.append(to.value)

    @rule(data=st.data())
    def move_on(self, data: st.DataObject) -> None:
        ways = sorted(TRANSITIONS[self.state])
        if ways:
            self.move(self.state, data.draw(st.sampled_from(ways)), "one")

    @rule()
    def note(self) -> None:
        record(self.job.id, EventKind.STEP, message="between")

    @invariant()
    def the_row_agrees(self) -> None:
        row = MigrationJob.objects.get(id=self.job.id)
        assert row.state == self.state
        assert (row.finished_at is None) == (self.state not in TERMINAL_STATES)

    @invariant()
    def the_trail_is_complete(self) -> None:
        events = list(self.job.events.order_by("seq"))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event.data["state"] for event in events if event.kind == EventKind.STATE] == self.states


@pytest.mark.django_db
def test_random_lives_of_a_job() -> None:
    make_pair()
    run_state_machine_as_test(
        JobMachine,
        settings=settings(
            max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
