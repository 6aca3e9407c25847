"""Compares measured pipeline bubbles with predicted ones: four padded stages, every schedule.

Stages are padded by sleep. A sleeping stage needs no core, so four ranks fit on two cores. Each row
has `late`: by how much actions exceeded their padding because of other load. Arguments select
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
# skipped steps: the first ones connect and allocate; in the last ones pipedream, which is predicted
# as an endless pipeline, drains
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


def main(selected: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(RANKS, Path(folder) / "store")
        try:
            for schedule, chunks in SCHEDULES.items():
                if selected and schedule not in selected:
                    continue
                measure(pool, Path(folder) / schedule, schedule, chunks)
        finally:
            pool.close()


def measure(pool: Pool, folder: Path, schedule: str, chunks: int) -> None:
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
    result = Result(outcomes, folder)
    predicted = simulate(
        schedule,
        RANKS,
        MICRO_BATCHES,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        weight_s=WEIGHT_S,
        virtual_stages=chunks,
    )
    measured = statistics.median(result.values("pipeline/bubble_fraction")[FIRST : FIRST + STEPS])
    record(
        "bubbles",
        what=(
            f"bubble of {schedule}, {RANKS} ranks, {MICRO_BATCHES} micro-batches: measured less "
            "predicted"
        ),
        value=abs(measured - predicted.bubble_fraction),
        unit="of the step",
        figure="<= 0.03",
        measured=round(measured, 4),
        predicted=round(predicted.bubble_fraction, 4),
        late=round(excess(result, seconds), 4),
    )


def excess(result: Result, seconds: dict[str, float]) -> float:
    """Excess of all actions of the sampled step over their padding, as a share of the padding."""
    padded = taken = 0.0
    for rank in range(RANKS):
        [timeline] = [
            event["data"] for event in result.events(rank) if event["type"] == "pipeline_timeline"
        ]
        for kind, _, _, start_s, end_s in timeline["actions"]:
            if kind in seconds:
                padded, taken = padded + seconds[kind], taken + end_s - start_s
    return taken / padded - 1.0


if __name__ == "__main__":
    main(sys.argv[1:])
