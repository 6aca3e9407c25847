"""Simulated policies: hand-computed schedules, figures of a trace, and synthetic traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestrator.scheduling.ordering.orders import ORDERS
from orchestrator.scheduling.placement.gangs import Gangs
from orchestrator.scheduling.preemption import victims
from orchestrator.scheduling.preemption.resizing import RESTART_S
from orchestrator.scheduling.simulation import (
    compare,
    elastic,
    measures,
    simulate,
    synthetic,
    traces,
)
from orchestrator.scheduling.simulation.elastic import simulate_elastic, smaller_sizes
from orchestrator.scheduling.simulation.traces import Trace


def trace(*rows: tuple[float, int, float], team: str = "a", **more: Any) -> Trace:
    """A trace of `(submit_s, devices, duration_s)`."""
    values = {
        "name": "hand",
        "seed": 0,
        "submit_s": np.array([row[0] for row in rows], dtype=float),
        "devices": np.array([row[1] for row in rows]),
        "duration_s": np.array([row[2] for row in rows], dtype=float),
        "priority": np.zeros(len(rows), dtype=np.int64),
        "user": ["ann"] * len(rows),
        "team": [team] * len(rows),
    }
    return Trace(**{**values, **more})


def starts(policy: str, made: Trace, nodes: int = 1, per_node: int = 8) -> list[float]:
    outcome = simulate.simulate(made, ORDERS[policy], nodes=nodes, devices_per_node=per_node)
    starts: list[float] = outcome.start_s.tolist()
    return starts


def test_fifo_starts_in_order_and_its_head_blocks() -> None:
    made = trace((0, 6, 100), (1, 8, 50), (2, 2, 10))
    assert starts("fifo", made) == [0, 100, 150]


def test_shortest_first_starts_the_shortest_that_fits() -> None:
    made = trace((0, 8, 100), (1, 8, 50), (2, 8, 10), (3, 4, 500))
    assert starts("shortest_first", made) == [0, 110, 100, 160]


@pytest.mark.parametrize("policy", ["orrery", "fair_share"])
def test_backfill_never_delays_the_reserved_head(policy: str) -> None:
    # the head needs the whole node; the short run ends before the holder can, the long one does not
    made = trace((0, 6, 1000), (1, 8, 100), (2, 2, 10), (3, 2, 5000))
    assert starts(policy, made) == [0, 1000, 2, 1100]


def test_no_backfilled_run_delays_the_head_whatever_the_predictions() -> None:
    for seed in range(20):
        made = trace((0, 6, 1000), (1, 8, 100), *[(2, 1, 700.0 + 10 * i) for i in range(30)])
        made = Trace(**{**made.__dict__, "seed": seed})
        assert starts("fair_share", made)[1] == 1000


def test_fair_share_serves_the_team_that_has_used_least() -> None:
    rows = [(0.0, 8, 1000.0), (1.0, 8, 100.0), (2.0, 8, 100.0)]
    made = trace(*rows, team="")
    made = Trace(**{**made.__dict__, "team": ["a", "a", "b"]})
    assert starts("fair_share", made) == [0, 1100, 1000]


def test_a_long_run_is_not_overtaken_for_ever() -> None:
    """Short runs that arrive all the time delay a long one by at most the policy's bound."""
    short = [(60.0 * i, 8, 60.0) for i in range(1, 1600)]
    made = trace((0, 8, 60), (1, 8, 40_000), *short)
    assert 30_000 < starts("orrery", made)[1] < 13 * 3600
    assert starts("shortest_first", made)[1] > 26 * 3600


def test_priority_goes_first_except_in_fifo() -> None:
    made = trace((0, 8, 100), (1, 8, 50), (2, 8, 60))
    made = Trace(**{**made.__dict__, "priority": np.array([0, 0, 5])})
    assert starts("orrery", made) == [0, 160, 100]
    assert starts("fifo", made) == [0, 100, 150]


def test_gangs_use_whole_nodes_and_devices_are_held_once() -> None:
    made = trace((0, 4, 100), (0, 4, 100), (1, 16, 10), (2, 12, 10))
    assert starts("fifo", made, nodes=2) == [0, 0, 100, 110]


@pytest.mark.parametrize("policy", [name for name, order in ORDERS.items() if not order.elastic])
def test_no_device_is_held_twice(policy: str) -> None:
    made = synthetic.draw("philly", runs=400, seed=3, devices=64)
    outcome = simulate.simulate(made, ORDERS[policy], nodes=8, devices_per_node=8)
    assert (outcome.start_s >= made.submit_s).all()
    assert np.allclose(outcome.end_s - outcome.start_s, made.duration_s)
    times = np.concatenate([outcome.start_s, outcome.end_s])
    change = np.concatenate([made.devices, -made.devices])
    order = np.lexsort((change, times))  # ends first
    assert np.cumsum(change[order]).max() <= 64


def test_equal_arguments_give_equal_results_and_seeds_differ() -> None:
    draws = [synthetic.draw("helios", runs=300, seed=seed, devices=64) for seed in (1, 1, 2)]
    assert (draws[0].duration_s == draws[1].duration_s).all()
    assert (draws[0].duration_s != draws[2].duration_s).any()


@pytest.mark.parametrize("kind", ["philly", "helios"])
def test_synthetic_traces_follow_the_published_statistics(kind: str) -> None:
    statistics = synthetic.STATISTICS[kind]
    made = synthetic.draw(kind, runs=60_000, seed=5, devices=1600)
    arrived = made.submit_s > 0  # the others are in progress at the beginning
    durations, sizes = made.duration_s[arrived], made.devices[arrived]
    for probability, seconds in statistics.quantiles.items():
        assert np.quantile(durations, probability) == pytest.approx(seconds, rel=0.12)
    assert durations.mean() == pytest.approx(statistics.mean_s, rel=0.05)
    for size, share, time in zip(
        statistics.devices, statistics.runs, statistics.device_time, strict=True
    ):
        assert (sizes == size).mean() == pytest.approx(share, rel=0.15, abs=0.001)
        part = (durations * sizes)[sizes == size].sum() / (durations * sizes).sum()
        assert part == pytest.approx(time, rel=0.2, abs=0.02)
    load = (durations * sizes).sum() / (1600 * made.submit_s[-1])
    assert load == pytest.approx(synthetic.OFFERED_LOAD, rel=0.02)


def test_a_trace_fits_a_small_cluster() -> None:
    made = synthetic.draw("philly", runs=2000, seed=1, devices=3)
    assert made.devices.max() == 2


def test_figures_of_a_hand_computed_trace() -> None:
    # fifo on 8 devices: starts 0, 100, 150; last submission at 200
    made = trace((0, 6, 100), (1, 8, 50), (2, 2, 10), (200, 1, 10))
    figures = compare.compare(made, compare.Setup(1, 8, ("fifo",)))["policies"]["fifo"]
    assert figures == {
        "mean_wait_s": pytest.approx((99 + 148) / 4),
        "p95_wait_s": pytest.approx(np.percentile([0, 99, 148, 0], 95)),
        "mean_completion_s": pytest.approx((100 + 149 + 158 + 10) / 4),
        "utilization": pytest.approx((600 + 400 + 20) / (8 * 200)),
        "fragmentation": 0.0,
        "fairness": 1.0,
        "starved": 0,
    }


def test_fragmentation_counts_idle_time_while_the_first_run_fits_only_the_total() -> None:
    # 4 devices of each node are free from 0 to 100, but the run needs 8 on one node
    made = trace((0, 4, 100), (0, 4, 100), (0, 4, 100), (10, 8, 10), (210, 1, 1))
    figures = compare.compare(made, compare.Setup(2, 8, ("fifo",)))["policies"]["fifo"]
    assert figures["fragmentation"] == 0.0  # 4 free devices are less than 8
    figures = compare.compare(made, compare.Setup(3, 6, ("fifo",)))["policies"]["fifo"]
    assert figures["fragmentation"] == pytest.approx(0.0)  # 8 = 2 nodes of 4; only 6 are free
    made = trace((0, 5, 100), (0, 5, 100), (10, 6, 10), (210, 1, 1))
    figures = compare.compare(made, compare.Setup(2, 8, ("fifo",)))["policies"]["fifo"]
    assert figures["fragmentation"] == pytest.approx(6 * 90 / (16 * 210), rel=1e-4)


def test_starved_counts_runs_beyond_a_day_and_ten_times_fifo() -> None:
    day = 86400.0
    made = trace((0, 1, 1), (0, 1, 1))
    outcome = simulate.Outcome(np.array([day + 1, 2 * day]), np.array([day + 2, 2 * day + 1]))
    assert measures.starved(made, outcome, fifo_mean_wait_s=0) == 2
    assert measures.starved(made, outcome, fifo_mean_wait_s=day / 8) == 1


def test_fairness_is_below_one_if_a_team_gets_less_than_its_share() -> None:
    rows = [(0.0, 8, 1000.0), (0.0, 8, 1000.0), (1000.0, 1, 1.0)]
    made = trace(*rows, team="")
    made = Trace(**{**made.__dict__, "team": ["a", "b", "a"]})
    figures = compare.compare(made, compare.Setup(1, 8, ("fifo",)))["policies"]["fifo"]
    assert figures["fairness"] == pytest.approx(0.5)


def test_shares_are_max_min_fair() -> None:
    wanted = np.array([10.0, 100.0, 100.0])
    assert measures.max_min_share(wanted, 110.0).tolist() == [10.0, 50.0, 50.0]
    assert measures.max_min_share(wanted, 500.0).tolist() == wanted.tolist()


def test_utilization_over_time_integrates_to_the_utilization() -> None:
    made = synthetic.draw("philly", runs=500, seed=2, devices=64)
    outcome = simulate.simulate(made, ORDERS["orrery"], nodes=8, devices_per_node=8)
    _, shares = measures.utilization_over_time(made, outcome, devices=64)
    figures = measures.measure(made, outcome, devices=64)
    assert shares.mean() == pytest.approx(figures["utilization"], rel=1e-6)
    assert shares.min() >= 0 and shares.max() <= 1 + 1e-9


def test_the_policy_waits_far_less_than_fifo_and_starves_nothing() -> None:
    made = synthetic.draw("philly", runs=1500, seed=1, devices=120)
    result = compare.compare(made, compare.Setup(15, 8, ("fifo", "orrery")))["policies"]
    assert result["orrery"]["mean_wait_s"] <= 0.5 * result["fifo"]["mean_wait_s"]
    assert result["orrery"]["utilization"] >= result["fifo"]["utilization"]
    assert result["orrery"]["starved"] == 0


def test_predictions_are_within_the_stated_error() -> None:
    made = synthetic.draw("philly", runs=1000, seed=1, devices=64)
    ratio = made.predicted_s() / made.duration_s
    assert 0.8 <= ratio.min() < 0.82 and 1.18 < ratio.max() <= 1.2
    assert traces.PREDICTION_ERROR == 0.2


def test_elastic_runs_shrink_for_a_waiting_run_and_grow_back() -> None:
    made = trace((0, 8, 1000.0), (100, 4, 400.0), (5000, 1, 1.0))
    outcome = simulate_elastic(made, ORDERS["orrery_elastic"], nodes=1, devices_per_node=8)
    # the first run shrinks from 8 to 4 devices, where both fit; the second one has its full size
    assert outcome.start_s[1] == 100
    assert outcome.end_s[1] == 500
    # 900 s of work are left at 100 s; 360 s on half of the devices until 500 s; growth 120 s later
    # if the size is 600 s old
    assert outcome.resizes == 2
    grown = [time for time, run, devices in outcome.changes or [] if (run, devices) == (0, 4)]
    assert grown[-1] == 700  # 600 s after the last change
    done = 100 + (700 - 140) / 2
    assert outcome.end_s[0] == pytest.approx(700 + RESTART_S + 1000 - done)
    assert outcome.lost_device_s == RESTART_S * (4 + 8)


def test_elastic_runs_do_all_their_work_and_devices_are_held_once() -> None:
    made = compare.synthetic_trace("philly:400:2", devices=40)
    assert made is not None
    outcome = simulate_elastic(made, ORDERS["orrery_elastic"], nodes=5, devices_per_node=8)
    held, used, last = 0, 0.0, 0.0
    for time, _, devices in outcome.changes or []:
        used += held * (time - last)
        held, last = held + devices, time
        assert 0 <= held <= 40
    assert held == 0 and outcome.resizes > 0
    work = float((made.duration_s * made.devices).sum())
    assert used == pytest.approx(work + outcome.lost_device_s, rel=1e-6)
    fixed = simulate.simulate(made, ORDERS["orrery"], nodes=5, devices_per_node=8)
    waits = [float((each.start_s - made.submit_s).mean()) for each in (outcome, fixed)]
    assert waits[0] < waits[1]
    figures = compare.compare(made, compare.Setup(5, 8, ("orrery", "orrery_elastic")))["policies"]
    assert "lost_device_h" not in figures["orrery"]
    assert figures["orrery_elastic"]["lost_device_h"] == pytest.approx(
        outcome.lost_device_s / 3600, abs=1e-6
    )


def grown(outcome: simulate.Outcome) -> list[tuple[float, int]]:
    """Time and run of each growth after the start."""
    return [
        (time, run)
        for time, run, devices in outcome.changes or []
        if devices > 0 and time > outcome.start_s[run]
    ]


def test_all_elastic_runs_that_could_grow_for_long_enough_grow_at_once() -> None:
    made = trace((0, 8, 3000.0), (0, 4, 100_000.0), (0, 4, 100_000.0))
    outcome = simulate_elastic(made, ORDERS["orrery_elastic"], nodes=1, devices_per_node=8)
    assert outcome.end_s[0] == 6000  # on 4 devices, the others on 2
    assert grown(outcome) == [(6120, 1), (6120, 2)]


def test_growth_does_not_depend_on_rounding_of_times() -> None:
    made = trace((0, 8, 453.3), (0, 8, 100_000.0))
    outcome = simulate_elastic(made, ORDERS["orrery_elastic"], nodes=1, devices_per_node=8)
    end = float(outcome.end_s[0])
    assert end + 120 - end < 120  # in floating point
    assert grown(outcome) == [(end + 120, 1)]


def test_a_run_that_is_nearly_done_does_not_grow() -> None:
    made = trace((0, 8, 2505.0), (0, 8, 2570.0))
    outcome = simulate_elastic(made, ORDERS["orrery_elastic"], nodes=1, devices_per_node=8)
    assert outcome.end_s.tolist() == [5010, 5140]  # 10 s were left when it could have grown
    assert outcome.resizes == 0


def test_victims_are_chosen_only_for_a_run_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewals, chosen = list[int](), list[int]()

    def choose(run: Any, *rest: Any) -> victims.Victims:
        chosen.append(run.run)
        return victims.choose(run, *rest)

    monkeypatch.setattr(elastic, "choose", choose)
    made = trace((0, 4, 1000.0), (10, 4, 1000.0), (100, 4, 100.0))
    outcome = simulate_elastic(
        made,
        ORDERS["orrery_elastic"],
        nodes=1,
        devices_per_node=8,
        renew=lambda: renewals.append(1),
    )
    assert chosen == [2] and outcome.start_s[2] == 100
    assert len(renewals) >= 6  # one for each submission and end


def test_growth_that_fits_nowhere_is_not_tried_again_until_devices_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = list[float]()
    enlarge = Gangs.enlarge

    def count(self: Gangs, run: Any) -> bool:
        tried.append(self.now)
        return enlarge(self, run)

    made = compare.synthetic_trace("philly:300:1", devices=40)
    assert made is not None
    monkeypatch.setattr(Gangs, "enlarge", count)
    simulate_elastic(made, ORDERS["orrery_elastic"], nodes=5, devices_per_node=8)
    assert len(tried) < 3 * len(made)


def test_no_simulated_run_shrinks_for_one_that_also_needs_others_to_stop() -> None:
    # 21 devices need 3 nodes without other runs: one could shrink to the fourth, two would stop
    rows = [(0.0, 8, 1000.0)] * 3 + [(0.0, 5, 1000.0), (100.0, 21, 10.0)]
    made = trace(*rows, priority=np.array([0, 0, 0, 0, 200]))
    outcome = simulate_elastic(made, ORDERS["orrery_elastic"], nodes=4, devices_per_node=8)
    assert outcome.start_s[4] == 1000
    assert outcome.resizes == 0
    assert outcome.end_s[:4].tolist() == [1000] * 4


def test_smaller_sizes_go_down_to_a_quarter() -> None:
    assert [size.devices for size in smaller_sizes(8)] == [4, 2]
    assert [size.slowdown for size in smaller_sizes(8)] == [2, 4]
    assert [size.devices for size in smaller_sizes(6)] == [3]
    assert smaller_sizes(1) == smaller_sizes(3) == ()
