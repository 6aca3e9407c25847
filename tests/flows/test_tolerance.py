"""Fault tolerance: a killed rank, a torn checkpoint, a hang; the curve stays equal bit by bit.

Also forks, profiles and benchmarks of training runs.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.flows.embedded import TINY, Orrery, train_spec
from tests.flows.gate import submitted

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]
STEPS = 160
LEAST_S = 8.0  # that a rank hangs or lags before it is reported


def spec(**train: Any) -> dict[str, Any]:
    """Validates often, saves often and asynchronously; hangs for 12 s at most."""
    made = train_spec(steps=STEPS, every=10, resources={"hang_s": 12})
    made["train"] |= {"eval": {"every_steps": 20, "batches": 1}, **train}
    made["train"]["checkpoint"]["async"] = True
    return made


def losses(orrery: Orrery, run: str) -> dict[int, float]:
    match = orrery.get(f"runs/{run}/series", name="loss", raw=1)
    return dict(zip(match["x"], match["y"], strict=True))


def caught_saving(checkpoints: Path, ranks: list[int]) -> Path | None:
    """What a save under way has begun to write, its ranks stopped; None where none is, and they go
    on.
    """
    if match := next(checkpoints.glob(".step-*"), None):
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        if match.exists():
            return match
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
    return None


@pytest.fixture(scope="module")
def undisturbed(installation: Orrery) -> tuple[str, dict[int, float]]:
    """A run that nothing befell, which others are compared with and begin from, and its losses."""
    run = installation.submit(spec(), name="undisturbed")
    assert installation.until_state(run, "finished", "failed") == "finished", installation.get(
        f"runs/{run}"
    )["exit"]
    installation.until_reported(run)
    return run, losses(installation, run)


def test_faults_leave_no_trace_in_the_curve(
    orrery: Orrery, undisturbed: tuple[str, dict[int, float]]
) -> None:
    quiet, curve = undisturbed
    alarms = orrery.events(quiet, "hang", "straggler")
    times = orrery.get(f"runs/{quiet}/series", name="loss", raw=1, x="time")["x"]
    # shorter delays are not reported; on a paused machine an alarm may be right
    assert not alarms or max(times) - min(times) > LEAST_S, (
        "none through first steps, validations and saves"
    )

    with submitted(orrery, spec(), attempts=3, name="disturbed") as (run, gate):
        step = gate.to(random.randint(15, 40))
        checkpoints = orrery.home / "runs" / run / "checkpoints"
        orrery.until(
            lambda: next(checkpoints.glob("step-*/manifest.json"), None),
            120,
            "a checkpoint to continue from",
        )
        os.kill(random.choice(orrery.ranks_of(run)), signal.SIGKILL)

        gate.to(step + 12, attempt=2)
        ranks = orrery.ranks_of(run, 2)
        torn = gate.until(lambda: caught_saving(checkpoints, ranks), "a save under way")
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

        # after this many steps their usual length is known; in the first ones a hang is waited for
        # three times as long
        begun = gate.to(1, attempt=3)
        gate.to(begun + 40, attempt=3)
        os.kill(orrery.ranks_of(run, 3)[1], signal.SIGSTOP)
        gate.open()
        ended = orrery.until_state(run, "finished", "failed", "cancelled")
    assert ended == "finished", orrery.get(f"runs/{run}")["exit"]
    orrery.until_reported(run)
    attempts = sorted(orrery.get(f"runs/{run}/attempts")["items"], key=lambda each: each["attempt"])
    assert [each["exit_class"] for each in attempts] == [
        "infrastructure",
        "infrastructure",
        "hang",
        "ok",
    ]
    assert attempts[2]["exit"]["rank"] == 1 and "is stopped" in attempts[2]["exit"]["reason"]
    events = orrery.events(run)
    # the last one: a test that was kept waiting itself has kept ranks at the gate
    hang = [event for event in events if (event["type"], event["attempt"]) == ("hang", 3)][-1]
    assert (hang["rank"], hang["data"]["ranks"], hang["data"]["waiting"]) == (1, [1], [0])
    assert hang["data"]["quiet_s"] <= 120, "a bound against hanging; seconds are the benchmark's"
    assert (
        hang["data"]["node"] == attempts[2]["placement"][0]["node"] and hang["data"]["stage"] == 0
    )
    restored = [event["data"]["step"] for event in events if event["type"] == "checkpoint_restored"]
    assert len(restored) == 3 and all(step % 10 == 0 for step in restored)
    assert not torn.exists(), "what was half written is cleared away"
    assert losses(orrery, run) == curve, "bit by bit"


def test_a_fork_survives_its_parents_pruning_and_a_rewound_run_repeats(
    orrery: Orrery, undisturbed: tuple[str, dict[int, float]]
) -> None:
    parent, before = undisturbed
    stored = sorted(each["step"] for each in orrery.get(f"runs/{parent}/checkpoints")["items"])
    assert stored == [STEPS - 10, STEPS]
    assert orrery.client is not None
    plan = {"dp": 1, "zero": 0, "micro_batch_size": 4, "global_batch_size": 4}
    request = {"step": stored[0], "spec": {"plan": plan, "train": {"steps": STEPS + 10}}}
    answer = orrery.client.post(f"runs/{parent}/fork", json=request)
    assert answer.status_code == 201, answer.text
    fork = str(answer.json()["id"])
    own = orrery.home / f"runs/{fork}/checkpoints/step-{stored[0]:08d}"
    orrery.until(lambda: (own / "manifest.json").exists(), 120, "the fork has its checkpoint")
    assert orrery.until_state(fork, "finished", "failed") == "finished", orrery.get(f"runs/{fork}")[
        "exit"
    ]
    orrery.until_reported(fork)
    after = losses(orrery, fork)
    assert min(after) == stored[0] + 1 and max(after) == STEPS + 10
    shared = range(stored[0] + 1, STEPS + 1)
    assert [after[step] for step in shared] == pytest.approx(
        [before[step] for step in shared], rel=1e-5
    )

    answer = orrery.client.post(f"runs/{parent}/retry", json={"step": stored[0]})
    assert answer.status_code == 200, answer.text
    assert max(losses(orrery, parent)) == stored[0], "later steps are discarded"
    assert orrery.until_state(parent, "finished", "failed") == "finished"
    orrery.until(lambda: max(losses(orrery, parent)) == STEPS, 60, "all points are reported")
    assert losses(orrery, parent) == before
    refused = orrery.client.post(f"runs/{parent}/fork", json={"step": 7})
    message = f"no retained checkpoint of step 7; there are {stored[0]}, {stored[1]}"
    assert refused.status_code == 422 and message in refused.json()["detail"]


def test_a_pipeline_shows_what_it_does_on_demand_and_sends_what_was_predicted(
    orrery: Orrery,
) -> None:
    """One artifact per stage for each request, one after the other, while training continues."""
    request = train_spec(steps=1_000_000, every=1_000_000)
    request["plan"] = {"pp": 2, "global_batch_size": 3}
    run = orrery.submit(request, name="watched")
    orrery.until_step(run, 3)
    assert orrery.client is not None
    for number, requested in enumerate(("profile", "memory-snapshot"), start=1):
        answer = orrery.client.post(f"runs/{run}/{requested}")
        assert answer.status_code == 200, answer.text
        orrery.until(
            lambda n=2 * number: len(orrery.get(f"runs/{run}/artifacts")["items"]) == n,
            120,
            requested,
        )
    assert orrery.client.post(f"runs/{run}/cancel").status_code == 200
    match = {each["name"]: each["id"] for each in orrery.get(f"runs/{run}/artifacts")["items"]}
    assert len({name.split("-step")[0] for name in match}) == 4, "of both ranks, both"
    for name, artifact in match.items():
        content = orrery.client.get(f"runs/{run}/artifacts/{artifact}/download").content
        if "profile" in name:
            assert json.loads(gzip.decompress(content))["traceEvents"]
        else:
            assert json.loads(content)["peak"]["cpu"]["params"] > 0
    sent = orrery.get(f"runs/{run}/series", name="comm/send_bytes")["y"]
    predicted = orrery.get(f"runs/{run}")["prediction"]
    assert set(sent) == {predicted["collectives"]["send_bytes"]}, (
        "hidden states, and the tied table's gradient"
    )
    held = [
        orrery.get(f"runs/{run}/series", name="memory/activations_bytes", rank=rank)["y"][-1]
        for rank in (0, 1)
    ]
    assert max(held) == pytest.approx(predicted["largest_bytes"]["activations"], rel=0.05), (
        "of all in flight"
    )
    orrery.until_state(run, "cancelled")


def test_a_benchmark_measures_its_variants_and_feeds_the_calibration(orrery: Orrery) -> None:
    body = {
        "techniques": ["zero", "collectives"],
        "steps": 2,
        "repeats": 1,
        "warmup_steps": 1,
        "seq_len": 32,
    }
    plan = {"dp": 2, "global_batch_size": 4}
    run = orrery.submit(
        {"kind": "benchmark", "model": TINY, "plan": plan, "benchmark": body}, name="benchmark"
    )
    assert orrery.until_state(run, "finished", "failed") == "finished", orrery.get(f"runs/{run}")[
        "exit"
    ]
    table = orrery.get(f"runs/{run}/benchmark")
    assert [row["state"] for row in table["rows"]] == ["measured"] * 4, table["rows"]
    assert max(row["deviation"] for row in table["rows"]) <= 1e-5, (
        "ZeRO lays the same numbers out differently"
    )
    held = [row["peak_bytes"] for row in table["rows"]]
    assert held == sorted(held, reverse=True) and held[-1] < held[0], (
        "each stage holds no more than the one before"
    )
    assert table["collectives"]["link"]["bytes_per_s"] > 0
    assert orrery.client is not None
    made = orrery.client.post("calibrations", json={"name": "this machine", "runs": [int(run)]})
    assert made.status_code == 201 and made.json()["rows"] == 4, made.text
