"""Runs and attempts under any order of events: submissions, reports, losses, requests of users.

A state machine of hypothesis calls the real services on the test database: reports arrive in any
order, twice, late, or with a wrong fence; nodes fall silent and return; users change their minds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.fleet import node_health
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run, RunEvent
from orchestrator.runs.states import ACTIVE, ATTEMPT_MOVES, ENDED, RUN_MOVES
from orchestrator.scheduling import services
from orchestrator.scheduling.accounting import ledger
from orchestrator.scheduling.accounting.split import CAUSES
from orchestrator.scheduling.models import Allocation, DeviceTime
from orchestrator.scheduling.reports.missing_attempts import Presence
from tests import factories
from tests.matrix import FULL
from tests.orchestrator.scheduling.conftest import Broker, FakeNode
from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire.node_messages import AttemptState, RunState

pytestmark = pytest.mark.django_db

NODES = ("n1", "n2")
DEVICES = 2  # of each node
CLASSES = [str(each) for each in ExitClass]
number = st.integers(0, 5)
rarely = st.integers(0, 4).map(lambda drawn: drawn == 4)


class Heard:
    """Silences of nodes and leases, as the scheduler measures them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def node_silence(self, node: str) -> float:
        return self.seconds[node]

    def lease_silence(self, fence: str, node: str) -> float:
        return self.seconds[node]


class Impatient(Presence):
    """Every wait has lasted long enough: orders repeat, requests become kills."""

    def due(self, fence: str, order: str, every_s: float) -> bool:
        return True

    def wanted_for(self, fence: str, order: str) -> float:
        return 1e9

    def missing_for(self, fence: str, node: str) -> float:
        return 1e9 if (fence, node) in self.missing else 0.0


class RunsAndAttempts(RuleBasedStateMachine):
    """Rules are what users, nodes and the timer do; invariants hold after each of them."""

    owner: User
    broker: Broker
    env: Any

    @initialize()
    def fleet(self) -> None:
        self.savepoint = transaction.atomic()
        self.savepoint.__enter__()
        self.heard, self.known = Heard(), Presence()
        self.nodes = {name: FakeNode(factories.node(name, devices=DEVICES)) for name in NODES}
        self.exited: dict[int, tuple[Any, ...]] = {}
        self.ended: dict[int, str] = {}
        self.retried: set[int] = set()
        # hypothesis leaves out some rules in each example; there is always something to act on
        for devices in (1, 2, 2):
            self.submit(devices=devices, retries=1, placed=True)

    def teardown(self) -> None:
        if not hasattr(self, "savepoint"):
            return
        try:
            self.accounts_add_up()
        finally:
            transaction.set_rollback(True)
            self.savepoint.__exit__(None, None, None)

    # users

    @rule(devices=st.integers(1, 3), retries=st.integers(0, 2), placed=st.booleans())
    def submit(self, devices: int, retries: int, placed: bool) -> None:
        spec = {
            "kind": "script",
            "script": {"command": ["true"]},
            "resources": {"devices": devices},
            "retries": dict.fromkeys(("user_error", "infrastructure", "lost", "hang"), retries),
        }
        runs.run_submit(owner=self.owner, name="machine", spec=spec)
        if placed:
            self.place()

    @rule(which=number, action=st.sampled_from(["cancel", "pause", "resume", "retry"]))
    def request(self, which: int, action: str) -> None:
        run = self.pick(Run, which)
        if run is None:
            return
        try:
            getattr(runs, f"run_{action}")(run=run, by=self.owner)
        except Refusal as refusal:
            assert refusal.status == 409, refusal
        else:
            if action == "retry":
                self.retried.add(run.pk)

    # the scheduler

    @rule()
    def place(self) -> None:
        Run.objects.filter(state=RunState.QUEUED).update(not_before=None)  # back-off has passed
        services.tick()

    @rule(impatient=st.booleans(), drained=st.booleans())
    def reap(self, impatient: bool, drained: bool) -> None:
        known = Impatient(missing=self.known.missing) if impatient else self.known
        services.reap(known=known, heard=self.heard, drained=drained)  # type: ignore[arg-type]

    @rule(final=st.booleans())
    def settle(self, final: bool) -> None:
        ledger.settle(now=clock.now() + timedelta(hours=1 if final else 0, seconds=10))

    # nodes

    @rule(
        which=number,
        foreign=rarely,
        kind=st.sampled_from(["launching", "running", "exited", "exited"]),
        exit_class=st.sampled_from(CLASSES),
        stale=rarely,
        times=st.integers(1, 2),
    )
    def report(
        self, which: int, foreign: bool, kind: str, exit_class: str, stale: bool, times: int
    ) -> None:
        attempt = self.pick(Attempt, which)
        if attempt is None:
            return
        placed = [share["node"] for share in attempt.placement]
        node = NODES[which % 2] if foreign else placed[which % len(placed)]
        more: dict[str, Any] = {"fence": "another-fence"} if stale else {}
        if kind == "exited":
            more |= {"class": exit_class, "reason": exit_class, "time": time.time()}
        for _ in range(times):
            self.nodes[node].send_report(attempt, kind, **more)

    @rule(which=number, step=st.integers(1, 9))
    def checkpoint(self, which: int, step: int) -> None:
        attempt = self.pick(Attempt, which)
        if attempt is None:
            return
        path = f"runs/{attempt.run_id}/checkpoints/step-{step}"
        for node in self.nodes.values():
            node.send_report(attempt, "checkpoint", step=step, path=path, tokens=1, bytes=1)

    @rule(node=st.sampled_from(NODES), names_attempts=st.booleans())
    def heartbeat(self, node: str, names_attempts: bool) -> None:
        self.heard.seconds[node] = 0.0
        placed = [
            attempt
            for attempt in Attempt.objects.order_by("-pk")[:4]
            if node in [share["node"] for share in attempt.placement]
        ]
        self.nodes[node].beat(*(placed if names_attempts else []))
        for attempt in placed:
            fence = str(attempt.fence)
            if names_attempts:
                self.known.present(fence, node)
            else:
                self.known.lacks(fence, node)

    @rule(node=st.sampled_from(NODES), lost=st.booleans())
    def silence(self, node: str, lost: bool) -> None:
        self.heard.seconds[node] = 1e6 if lost else self.env.node_silent_s

    @rule(node=st.sampled_from(NODES))
    def confirm_lost(self, node: str) -> None:
        try:
            node_health.node_confirm_lost(node=Node.objects.get(name=node), by=self.owner)
        except Refusal as refusal:
            assert refusal.status == 409, refusal

    def pick(self, model: Any, which: int) -> Any:
        """One of the newest rows, or None; mostly one that has not ended."""
        rows = list(model.objects.order_by("-pk")[:6])
        if which < 4:
            ended = {str(state) for state in (*ENDED, AttemptState.EXITED)}
            rows = [row for row in rows if row.state not in ended] or rows
        return rows[which % len(rows)] if rows else None

    # what always holds

    @invariant()
    def one_open_attempt_per_run(self) -> None:
        for run in Run.objects.prefetch_related("attempts"):
            attempts = sorted(run.attempts.all(), key=lambda attempt: attempt.number)
            numbers = [attempt.number for attempt in attempts]
            assert numbers == list(range(1, run.attempt_number + 1)), run
            states = [attempt.state for attempt in attempts if attempt.state != "exited"]
            assert len(states) == (run.state in ACTIVE), (run.state, states)

    @invariant()
    def allocations_match_open_attempts(self) -> None:
        held: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for allocation in Allocation.objects.filter(released=None).select_related("device__node"):
            device = (allocation.device.node.name, allocation.device.index)
            assert device not in held[allocation.attempt_id]
            held[allocation.attempt_id].add(device)
        expected = {
            attempt.pk: {
                (share["node"], index) for share in attempt.placement for index in share["devices"]
            }
            for attempt in Attempt.objects.exclude(state=AttemptState.EXITED)
        }
        assert {key: value for key, value in held.items() if value} == expected

    @invariant()
    def ended_attempts_and_runs_stay_ended(self) -> None:
        for attempt in Attempt.objects.filter(state=AttemptState.EXITED):
            facts = (attempt.exit_class, attempt.exit, attempt.ended)
            assert self.exited.setdefault(attempt.pk, facts) == facts
        assert not Attempt.objects.filter(pk__in=self.exited).exclude(state="exited").exists()
        for run in Run.objects.all():
            before = self.ended.get(run.pk)
            if before is not None and run.pk not in self.retried:
                assert run.state == before, f"run {run.pk} went from {before} to {run.state}"
            self.ended.pop(run.pk, None)
            if run.state in ENDED:
                self.ended[run.pk] = run.state
        self.retried.clear()

    @invariant()
    def events_are_numbered_and_follow_the_tables(self) -> None:
        for run in Run.objects.all():
            events = list(RunEvent.objects.filter(run=run).order_by("seq"))
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            state: str | None = None
            attempts: dict[int, str] = {}
            for event in events:
                if event.type != "state_changed":
                    continue
                old, new = event.data["old"], event.data["new"]
                if event.data["of"] == "run":
                    assert old == state
                    assert state is None or new in RUN_MOVES[RunState(state)]
                    state = new
                else:
                    assert old == attempts.get(event.attempt, "assigned")
                    assert new in ATTEMPT_MOVES[AttemptState(old)]
                    attempts[event.attempt] = new
            assert state == run.state

    def accounts_add_up(self) -> None:
        self.settle(final=False)
        allocated = 0.0
        for attempt in Attempt.objects.filter(state=AttemptState.EXITED):
            row = DeviceTime.objects.get(attempt=attempt)
            lost = sum(getattr(row, cause) for cause in CAUSES)
            assert row.allocated == pytest.approx(row.productive + lost)
            assert min(row.productive, *(getattr(row, cause) for cause in CAUSES)) >= 0.0
            assert attempt.ended is not None
            devices = sum(len(share["devices"]) for share in attempt.placement)
            seconds = (attempt.ended - attempt.created).total_seconds()
            assert row.allocated == pytest.approx(devices * seconds, abs=1e-3)
            allocated += row.allocated
        assert ledger.total().allocated == pytest.approx(allocated)
        assert not DeviceTime.objects.exclude(attempt__state=AttemptState.EXITED).exists()


def test_no_order_of_events_breaks_runs_and_attempts(
    broker: Broker, people: factories.People, settings_: Any
) -> None:
    machine = type(
        "Machine",
        (RunsAndAttempts,),
        {"owner": people.admin, "broker": broker, "env": settings_.ENV},
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100 if FULL else 8,
            stateful_step_count=50 if FULL else 30,
            derandomize=not FULL,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def settings_(settings: Any) -> Any:
    """Django's settings; `settings` are hypothesis's in this file. Any share may be lost."""
    settings.ENV = settings.ENV.model_copy(update={"lost_share": 0.5})
    return settings
