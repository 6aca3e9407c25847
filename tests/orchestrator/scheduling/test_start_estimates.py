"""Estimated starts of waiting runs: simulated, with an interval, and what starts them sooner."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.runs.models import Run
from orchestrator.scheduling import selectors, services
from orchestrator.scheduling.models import QueueEstimate
from orchestrator.scheduling.ordering.decayed_usage import DecayedUsage
from orchestrator.scheduling.queue import start_estimates
from orchestrator.scheduling.simulation import estimates
from tests import factories
from tests.orchestrator.scheduling.conftest import Broker
from tests.orchestrator.scheduling.test_policy_boundaries import T, node, run

POLICY = estimates.Policy({}, {}, {}, DecayedUsage())


def test_runs_start_one_after_the_other_with_an_interval() -> None:
    queue = [run(1, 4, 20, expected_s=100.0), run(2, 4, 10, expected_s=100.0)]
    nodes = [node("a", 0, 4)]
    starts = estimates.estimate_starts(queue, nodes, T, policy=POLICY, ends={99: (T + 80, T + 120)})
    assert 80 <= starts[1].low - T <= starts[1].start - T <= starts[1].high - T <= 120
    assert 160 <= starts[2].low - T <= starts[2].high - T <= 240
    assert starts[2].low < starts[2].high


def test_the_interval_holds_four_fifths_of_the_starts() -> None:
    """One holder ends uniformly between two times, so the start's quantiles are known."""
    ends = {99: (T + 1000.0, T + 2000.0)}
    queue, nodes = [run(1, 4, 20, expected_s=100.0)], [node("a", 0, 4)]
    for samples in (7, 32):
        estimate = estimates.estimate_starts(
            queue, nodes, T, policy=POLICY, ends=ends, samples=samples
        )[1]
        assert estimate.start == pytest.approx(T + 1500, abs=1500 / samples)
        covered = (estimate.high - estimate.low) / 1000
        assert covered == pytest.approx(0.8, abs=2 / samples)


def test_samples_need_no_reasons_and_no_pass_without_free_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    decide = estimates.Policy.decide

    def counted(self: Any, queue: Any, nodes: Any, now: float) -> Any:
        passes.append(sum(slot.run is None for each in nodes for slot in each.slots))
        decision = decide(self, queue, nodes, now)
        assert not any(wait.reason for wait in decision.waits)
        return decision

    monkeypatch.setattr(estimates.Policy, "decide", counted)
    queue = [run(1, 4, 20, expected_s=100.0), run(2, 4, 10, expected_s=100.0)]
    ends = {99: (T + 80.0, T + 120.0)}
    estimates.estimate_starts(queue, [node("a", 0, 4)], T, policy=POLICY, ends=ends, samples=1)
    assert passes == [4, 4]  # when the holder ends, and when run 1 ends


def test_a_start_is_unknown_while_a_holder_may_run_for_ever() -> None:
    assert not estimates.estimate_starts([run(1, 4)], [node("a", 0, 4)], T, policy=POLICY, ends={})


def test_runs_like_the_recent_ones_delay_a_run() -> None:
    nodes, ends = [node("a", 0, 4)], {99: (T + 100, T + 100)}
    waiting = [run(1, 4, 0, expected_s=10_000.0)]
    recent = [run(i, 4, 1000 - 50 * i, expected_s=60.0) for i in range(10)]
    alone = estimates.estimate_starts(waiting, nodes, T, policy=POLICY, ends=ends)
    busy = estimates.estimate_starts(
        waiting, nodes, T, policy=POLICY, ends=ends, recent=recent, samples=1
    )
    assert alone[1].start == T + 100
    assert busy[1].start > T + 1000


def test_what_would_start_a_run_now() -> None:
    nodes = [node("a", 6, 2, until=None)]
    answers = estimates.sooner([run(1, 8, 9)], nodes, T, policy=POLICY, sizes={1: [6, 4]})
    assert answers == {1: "With 6 devices: now."}
    # run 2 waits behind the reserved run 1, and a short one could not delay it
    queue = [run(1, 8, 9), run(2, 4, 8, max_seconds=9000.0)]
    held = [node("a", 6, 2, until=T + 5000, early=T + 5000)]
    answers = estimates.sooner(queue, held, T, policy=POLICY, sizes={})
    assert answers == {2: "With a time limit of 10 min: now."}


@pytest.mark.django_db
def test_the_job_stores_estimates_that_queue_and_rest_show(broker: Broker, owner: User) -> None:
    factories.node("n1", devices=4)
    first = factories.run(owner, devices=4, resources={"max_seconds": 600})
    services.tick()
    second = factories.run(owner, devices=4)
    services.tick()
    start_estimates.compute()
    (entry,) = selectors.queue_entries(user=owner, limit=5)
    assert entry.run.pk == second.pk and entry.earliest and entry.latest and entry.may_start
    assert entry.earliest <= entry.may_start <= entry.latest
    item = factories.api(owner).get("/api/v1/queue").json()["items"][0]
    assert item["earliest_start"] <= item["may_start"] <= item["latest_start"]
    QueueEstimate.objects.update(computed=clock.now() - timedelta(hours=1))
    (entry,) = selectors.queue_entries(user=owner, limit=5)
    assert entry.earliest is None
    Run.objects.filter(pk__in=[first.pk, second.pk]).update(state="cancelled")
    assert start_estimates.compute() == {"estimated": 0}
    assert QueueEstimate.objects.get().starts == {}


def test_sizes_keep_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = [(7, 16, {"dp": 8, "tp": 2, "micro_batch_size": 1, "global_batch_size": 12})]

    class Rows:
        def filter(self, **_: Any) -> Rows:
            return self

        def values_list(self, *_: str) -> Any:
            return rows

    monkeypatch.setattr(start_estimates.Run, "objects", Rows())
    assert start_estimates._sizes([run(7, 16)]) == {7: [12, 8, 6, 4, 2]}
