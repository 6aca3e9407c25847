"""What a rank shows from outside while it trains, and who came late to a step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.training.conftest import make_spec
from tests.workers.training.pool import Result, _run
from workers.contracts.wire.progress import BEACON, BEAT, LAYOUT, VERSION, read_progress, read_pulse
from workers.metrics.beacon import Beacon
from workers.training.parallel import arrival_skew
from workers.training.parallel.arrival_skew import ArrivalTracker


def test_a_beacon_is_read_while_its_thread_is(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.metrics.beacon.PULSE_S", 0.2)
    beacon = Beacon(tmp_path)
    try:
        beacon.mark("forward", step=3)
        beacon.mark("backward", step=3)
        before = time.monotonic()
        beacon.mark("forward", step=3)
        after = time.monotonic()
        while not read_pulse(tmp_path).where:
            time.sleep(0.02)
        while (
            results := read_progress(tmp_path, now_ns=(now := time.monotonic_ns()))
        ).beat_s >= results.idle_s:
            time.sleep(0.02)  # it beats, though it makes no mark
        assert (results.step, results.micro_batch, results.phase, results.marks) == (
            3,
            1,
            "forward",
            4,
        )
        assert (
            now / 1e9 - after <= results.idle_s + 1e-6
            and results.idle_s <= now / 1e9 - before + 1e-6
        )
    finally:
        beacon.close()
    later = read_progress(tmp_path, now_ns=time.monotonic_ns() + 60 * 10**9)
    assert later.idle_s > 60 and later.beat_s > 60, "and what is gone does not beat"
    assert read_progress(tmp_path / "nowhere", now_ns=0) is None


@pytest.mark.parametrize("zero", [1, 3])
def test_every_rank_reports_how_late_it_came(zero, train, tmp_path):
    result = train(
        make_spec(None, {"dp": 2, "zero": zero, "micro_batch_size": 1, "global_batch_size": 4}),
        tmp_path,
    )
    late = [result.values("comm/arrival_skew_s", rank) for rank in (0, 1)]
    assert [len(each) for each in late] == [4, 4]
    assert all(min(pair) == 0.0 <= max(pair) for pair in zip(*late, strict=True)), (
        "the first one is not late"
    )
    for rank in (0, 1):
        results = read_progress(tmp_path / f"rank-{rank}", now_ns=time.monotonic_ns())
        assert results.step >= 3 and results.marks > 4 * 4


def test_a_rank_that_is_last_step_after_step_is_reported_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(arrival_skew.time, "perf_counter", lambda: now[0])
    of_rank_0 = ArrivalTracker(rank=0, size=4, stages=2, device=torch.device("cpu"))
    reported = []
    for step in range(30):
        now[0] += 1.0
        slow = 0.9 if step < 24 else 0.4
        # the second stage begins before the first, always
        late_s = of_rank_0.finish_step([0.4, 0.4, 0.2, 0.2 + slow - 0.4])
        assert late_s == 0.0
        reported.append(of_rank_0.straggler())
    [results] = [each for each in reported if each]
    assert (results["rank"], results["stage"], results["late_s"]) == (3, 1, 0.5)
    assert reported.index(results) >= 7, "after eight seconds"


def test_on_a_device_arrivals_are_those_of_the_step_before(monkeypatch):
    """The host launches work ahead of the device, whose own times are known a step later."""
    now = [10.0]
    tracker = ArrivalTracker(rank=1, size=2, stages=1, device=torch.device("cpu"))
    monkeypatch.setattr(tracker, "_reads_late", True)
    monkeypatch.setattr(tracker._clock, "now", lambda: now[0])
    tracker.sums_sent()
    sent = []
    for step, took_s in enumerate((0.5, 0.7, 0.2)):
        tracker.begin()
        now[0] += took_s
        tracker._ready(torch.zeros(()))
        sent.append(tracker.delays())
        tracker.sums_sent()
        now[0] += 5.0 if step == 1 else 0.0  # the host reads much later: no delay
        tracker.finish_step([0.0, sent[-1][1]])
    assert sent[0] == [0.0, 0.0], "no step is complete yet"
    assert [each[1] for each in sent[1:]] == [pytest.approx(0.5), pytest.approx(0.7)]


def late_on(directory: str, rank: int) -> dict[str, Any]:
    """In a rank of the pool, each on a node of its own: a run in which all judge that `rank` is
    late.
    """
    stored, here = ArrivalTracker.straggler, os.environ["RANK"]
    ArrivalTracker.straggler = lambda self: {
        "rank": rank,
        "stage": 0,
        "late_s": 0.1,
        "message": "it comes late",
    }
    places = {
        "RANK": here,
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "ORRERY_NODE": f"n{here}",
    }
    try:
        return _run(
            make_spec(None, {"dp": 2, "zero": 1, "global_batch_size": 2}, steps=2),
            Path(directory),
            places,
        )
    finally:
        ArrivalTracker.straggler = stored


def test_over_several_nodes_the_late_rank_reports_itself_with_its_node(pools, tmp_path):
    call = "tests.workers.training.test_beacon:late_on"
    result = Result(pools(2).call(call, directory=str(tmp_path), rank=1), tmp_path)
    assert [outcome["class"] for outcome in result.outcomes] == ["ok", "ok"], result.outcomes
    reported = [
        [event["data"] for event in result.events(rank) if event["type"] == "straggler"]
        for rank in (0, 1)
    ]
    assert reported[0] == [] and [each["step"] for each in reported[1]] == [1, 2]
    assert all((each["rank"], each["node"], each["stage"]) == (1, "n1", 0) for each in reported[1])


def test_a_look_into_a_first_mark_that_is_being_written_reports_nothing(tmp_path):
    (tmp_path / BEACON).write_bytes(LAYOUT.pack(VERSION, 1, 0, 3, 0, b"") + BEAT.pack(5))
    assert read_progress(tmp_path, now_ns=10**15) is None, (
        "else it looks as if nothing had moved since the machine began"
    )
