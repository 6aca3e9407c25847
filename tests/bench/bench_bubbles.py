"""Measured pipeline bubbles against predicted ones: four stages padded by sleep, every schedule,
Orrery's own engine.

A sleeping stage needs no core, so that four ranks fit on two. Beside each difference stands by how
much the padding
was missed: what actions took more than they should have, on a machine that does other things too.
Arguments pick
schedules.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.planner.schedules.simulate import simulate
from tests.bench.record import record
from tests.workers.training.conftest import make_spec
from tests.workers.training.pool import Pool, Result

RANKS, MICRO_BATCHES, STEPS = 4, 8, 6
# steps left out: the first ones connect and allocate; in the last ones pipedream, predicted as
# endless, runs empty
FIRST, LAST = 2, RANKS
FORWARD_S, BACKWARD_S, WEIGHT_S = 0.04, 0.04, 0.04
SCHEDULES = {
    "naive": 1,
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "zb1p": 2,
    "zbv": 2,
    "dualpipev": 2,
    "pipedream": 1,
}


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(RANKS, Path(folder) / "store")
        try:
            for schedule, chunks in SCHEDULES.items():
                if wanted and schedule not in wanted:
                    continue
                compare(pool, Path(folder) / schedule, schedule, chunks)
        finally:
            pool.close()


def compare(pool: Pool, folder: Path, schedule: str, chunks: int) -> None:
    plan: dict[str, Any] = {"pp": RANKS, "schedule": schedule, "global_batch_size": MICRO_BATCHES}
    if chunks > 1:
        plan["virtual_stages"] = chunks
    model = {
        "name": "padded",
        "layers": RANKS * chunks,
        "hidden": 8,
        "heads": 2,
        "ffn": 16,
        "vocab": 256,
        "max_seq_len": 8,
    }
    spec = make_spec(model, plan, steps=FIRST + STEPS + LAST, seq_len=8)
    seconds = {"F": FORWARD_S, "B": BACKWARD_S + WEIGHT_S, "I": BACKWARD_S, "W": WEIGHT_S}
    outcomes = pool.call(
        "tests.bench.bubble_ranks:padded", spec=spec, directory=str(folder), seconds=seconds
    )
    assert {outcome["class"] for outcome in outcomes} == {"ok"}, outcomes
    found = Result(outcomes, folder)
    message = simulate(
        schedule,
        RANKS,
        MICRO_BATCHES,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        weight_s=WEIGHT_S,
        virtual_stages=chunks,
    )
    measured = statistics.median(found.values("pipeline/bubble_fraction")[FIRST : FIRST + STEPS])
    record(
        "bubbles",
        what=(
            f"bubble of {schedule}, {RANKS} ranks, {MICRO_BATCHES} micro-batches: measured less "
            "predicted"
        ),
        value=abs(measured - message.bubble_fraction),
        unit="of the step",
        figure="<= 0.03",
        measured=round(measured, 4),
        predicted=round(message.bubble_fraction, 4),
        late=round(late(found, seconds), 4),
    )


def late(found: Result, seconds: dict[str, float]) -> float:
    """Of the sampled step: what all actions took more than they were padded to, as a share of that."""
    wanted = taken = 0.0
    for rank in range(RANKS):
        [event] = [
            each["data"] for each in found.events(rank) if each["type"] == "pipeline_timeline"
        ]
        for kind, _, _, start_s, end_s in event["actions"]:
            if kind in seconds:
                wanted, taken = wanted + seconds[kind], taken + end_s - start_s
    return taken / wanted - 1.0


if __name__ == "__main__":
    main(sys.argv[1:])
