"""Trials of plans on a node: with programs that write what ranks would, and one real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.launcher.harness import Node
from workers.contracts.wire.maintenance.plan_trials import CHOSEN, TRIAL, TRIAL_BEGAN
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.exits.classification import Verdict
from workers.launcher.plan_trials.outcome import Chosen
from workers.launcher.plan_trials.phase import TrialPhase
from workers.launcher.rundir import RunDir, read_json

# what the ranks of trials write; a step time of None fails with the exit of `failure`
RANKS = """
import json, os, sys, time
folder, times, failure = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
order = json.load(open(folder + "/trials.json"))
os.makedirs(folder + "/rank-0", exist_ok=True)
def put(name, data):
    open(folder + "/" + name + ".new", "w").write(json.dumps(data))
    os.replace(folder + "/" + name + ".new", folder + "/" + name)
put("rank-0/process.json", {"pid": os.getpid()})
results = {each["index"]: each for each in order["results"]}
if failure.get("at") == "start":
    put("rank-0/exit.json", failure)
    put("rank-0/status.json", {"code": failure["code"], "time": time.time()})
    sys.exit(1)
for candidate in order["candidates"]:
    index = candidate["index"]
    if index in results:
        continue
    state = {"results": list(results.values()), "current": index}
    put("state.json", state)
    time.sleep(0.25)
    if times[index] is None:
        put("rank-0/exit.json", failure)
        put("rank-0/status.json", {"code": failure["code"], "time": time.time()})
        sys.exit(1)
    results[index] = {"index": index, "state": "measured", "step_time_s": times[index],
                      "steps": 5, "visits": 1, "seconds": 0.2}
put("state.json", {"results": list(results.values()), "ended": "one plan is clearly the fastest"})
"""
OOM = {"class": "out_of_memory", "reason": "out of memory: 3 GiB", "code": 66}


class RecordingLink:
    """A link that stores reports."""

    class node:
        node = "n1"

    def __init__(self) -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def report(self, kind: str, data: dict[str, Any]) -> None:
        self.reports.append((kind, data))

    def flush(self) -> bool:
        return True

    def events(self, type_: str) -> list[dict[str, Any]]:
        return [data["data"] for kind, data in self.reports if data.get("type") == type_]


def plans(count: int) -> list[dict[str, Any]]:
    return [
        {"index": index, "plan": {"dp": 1, "zero": index}, "step_time_s": 1.0 + index / 10}
        for index in range(count)
    ]


def order_of(**trials: Any) -> LaunchOrder:
    body = {"candidates": plans(3), "steps": 5, "warmup_steps": 1, "run_steps": 10_000}
    return LaunchOrder.from_dict(
        {
            "run": "7",
            "kind": "train",
            "attempt": 1,
            "attempt_id": "71",
            "fence": "f" * 8,
            "spec": {"kind": "train", "train": {"steps": 10_000, "seq_len": 8}},
            "local_devices": [0],
            "local_ranks": 1,
            "world_size": 1,
            "run_dir": "runs/7/attempt-1",
            "trials": {**body, "max_share": 0.05, **trials},
        }
    )


Run = Callable[..., tuple[Chosen | Verdict | None, RecordingLink, int]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "runs" / "7" / "attempt-1"
    folder.mkdir(parents=True)

    def phase_run(
        times: list[float | None],
        failure: dict[str, Any] | None = None,
        *,
        stop_after: int | None = None,
        **trials: Any,
    ) -> tuple[Chosen | Verdict | None, RecordingLink, int]:
        link, started = RecordingLink(), 0

        def spawn(order: LaunchOrder, run_dir: RunDir, *, purpose: str) -> Any:
            nonlocal started
            assert order.run_dir == "runs/7/attempt-1/trials" and purpose == f"trials-{started}"
            started += 1
            words = [str(run_dir.path), json.dumps(times), json.dumps(failure or {})]
            return subprocess.Popen([sys.executable, "-S", "-c", RANKS, *words])

        def poll() -> bool:
            return stop_after is None or len(link.events(TRIAL_BEGAN)) < stop_after

        phase = TrialPhase(
            order_of(**trials),
            RunDir(folder),
            link,  # type: ignore[arg-type]
            spawn=spawn,
            poll=poll,
            clean_up=lambda: None,
            out_of_time=lambda since: False,
        )
        return phase.run(), link, started

    return phase_run


def test_the_fastest_plan_is_chosen_and_reported_once(run: Run) -> None:
    chosen, link, started = run([0.5, 0.3, 0.4])
    assert isinstance(chosen, Chosen) and chosen.index == 1 and started == 1
    assert chosen.plan == {"dp": 1, "zero": 1} and "fastest of 3 measured plans" in chosen.reason
    assert [each["index"] for each in link.events(TRIAL_BEGAN)] == [0, 1, 2]
    assert sorted(each["index"] for each in link.events(TRIAL)) == [0, 1, 2]
    [report] = link.events(CHOSEN)
    assert report["index"] == 1 and len(report["results"]) == 3 and report["spent_s"] > 0
    assert [kind for kind, _ in link.reports].count("running") == 1


def test_a_plan_that_runs_out_of_memory_is_left_out(run: Run) -> None:
    chosen, link, started = run([0.5, None, 0.4], OOM)
    assert isinstance(chosen, Chosen) and chosen.index == 2 and started == 2
    failed = next(each for each in link.events(TRIAL) if each["state"] == "failed")
    assert failed["index"] == 1 and failed["exit_class"] == "out_of_memory"
    assert "3 GiB" in failed["message"] and failed["seconds"] > 0


def test_a_run_whose_plans_all_fail_ends_with_every_reason(run: Run) -> None:
    ended, link, started = run([None, None, None], OOM)
    assert isinstance(ended, Verdict) and started == 3
    assert ended.exit_class == "out_of_memory" and ended.cause == "plan_trials"
    assert all(f"plan {number}: Rank 0: out of memory" in ended.reason for number in (1, 2, 3))
    assert link.events(CHOSEN) == []


def test_a_broken_machine_blames_no_plan(run: Run) -> None:
    failure = {"class": "infrastructure", "reason": "No space left on device", "code": 69}
    ended, link, started = run([None, 0.3, 0.4], failure)
    assert isinstance(ended, Verdict) and ended.exit_class == "infrastructure" and started == 1
    assert link.events(TRIAL) == []


def test_a_wrong_spec_ends_the_attempt_before_any_trial(run: Run) -> None:
    failure = {"class": "user_error", "reason": "data.path is missing", "code": 64, "at": "start"}
    ended, _, started = run([0.5, 0.3, 0.4], failure)
    assert isinstance(ended, Verdict) and "data.path is missing" in ended.reason and started == 1


def test_a_stop_ends_the_trials_without_a_choice(run: Run) -> None:
    ended, link, _ = run([0.5, 0.3, 0.4], stop_after=2)
    assert ended is None and link.events(CHOSEN) == []


def test_results_of_an_earlier_attempt_are_not_measured_again(run: Run) -> None:
    known = {"index": 1, "state": "measured", "step_time_s": 0.2, "steps": 5, "visits": 1}
    chosen, link, _ = run([0.5, 9.0, 0.4], results=[known], spent_s=30.0)
    assert isinstance(chosen, Chosen) and chosen.index == 1
    assert [each["index"] for each in link.events(TRIAL_BEGAN)] == [0, 2]
    assert 30.0 < link.events(CHOSEN)[0]["spent_s"] < 60.0


def test_a_plan_during_which_two_attempts_ended_is_left_out(run: Run) -> None:
    chosen, link, _ = run([0.1, 0.3, 0.4], interrupted={"0": 2})
    assert isinstance(chosen, Chosen) and chosen.index == 1
    assert next(each for each in link.events(TRIAL) if each["index"] == 0)["state"] == "failed"


@pytest.mark.flow
def test_two_ranks_try_plans_then_train_with_the_fastest(node: Node) -> None:
    plan = {"dp": 2, "global_batch_size": 2, "micro_batch_size": 1}
    candidates = [
        {"index": index, "plan": {**plan, **more}, "step_time_s": 0.02 + index / 1000}
        for index, more in enumerate([{"zero": 3}, {"zero": 0}])
    ]
    train = {"steps": 4, "seq_len": 16}
    trials = {"candidates": candidates, "steps": 3, "warmup_steps": 1, "run_steps": 100_000}
    order = {
        **node.order([], ranks=2),
        "kind": "train",
        "spec": {"kind": "train", "model": "llama-tiny", "train": train, "plan": plan},
        "plan": plan,
        "trials": {**trials, "max_share": 0.5},
    }
    run_dir = node.launch(order)
    assert node.exited(order, 300)["class"] == "ok"
    events = [r["data"] for r in node.reports if r["type"] == "event"]
    results = {each["data"]["index"]: each["data"] for each in events if each.get("type") == TRIAL}
    assert set(results) == {0, 1} and all(each["steps"] >= 3 for each in results.values())
    [chosen] = [each["data"] for each in events if each.get("type") == CHOSEN]
    assert results[chosen["index"]]["step_time_s"] == min(
        each["step_time_s"] for each in results.values()
    )
    assert read_json(run_dir.spec)["plan"]["zero"] == chosen["plan"]["zero"]
    assert node.seqs("points", 0) == [1, 2, 3, 4], "trials write no points of the run"


@pytest.mark.flow
def test_a_run_is_cancelled_while_plans_are_tried(node: Node) -> None:
    plan = {"dp": 1, "global_batch_size": 1, "micro_batch_size": 1}
    candidates = [{"index": i, "plan": {**plan}, "step_time_s": 0.02} for i in range(2)]
    train = {"steps": 1_000_000, "seq_len": 16}
    trials = {"candidates": candidates, "steps": 100_000, "warmup_steps": 1, "max_share": 0.5}
    order = {
        **node.order([], ranks=1),
        "kind": "train",
        "spec": {"kind": "train", "model": "llama-tiny", "train": train, "plan": plan},
        "plan": plan,
        "trials": {**trials, "run_steps": 1_000_000},
    }
    run_dir = node.launch(order)
    node.until(
        lambda: next((r for r in list(node.reports) if r["data"].get("type") == TRIAL_BEGAN), None),
        120,
        TRIAL_BEGAN,
    )
    began = time.monotonic()
    (run_dir.path / "request.json").write_text('{"action": "cancel", "grace_s": 20}')
    ended = node.exited(order)
    assert ended["class"] == "cancelled" and time.monotonic() - began < 20
    assert not (run_dir.path / "rank-0").exists()
