"""What 16-bit training costs in loss: bf16 and fp16 beside fp32 over 300 steps of Shakespeare, one process each.

Beside them fp32 once more in other micro-batches, equal but for the order of sums: what rounding to 24 bits does.
The learning rate is one without gradient spikes: at 1e-3 one of norm 120 at step 24 makes fp16 skip three updates, its
scale starting at 65536, and its curve stays those steps behind: 0.8% at the end.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.record import record
from workers.training.accept import accept
from workers.training.attempt import run_attempt
from workers.training.environment import read_environment

STEPS = 300
LAST = 30  # steps whose mean is the final training loss
SPEC: dict[str, Any] = {
    "kind": "train",
    "model": "llama-tiny",
    "train": {
        "steps": STEPS,
        "seq_len": 128,
        "seed": 1,
        "optimizer": {"name": "adamw", "lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "lr_schedule": {"name": "cosine", "warmup_steps": 30, "min_lr": 5e-5},
        "clip_norm": 1.0,
        "eval": {"every_steps": STEPS, "batches": 32},
    },
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        curves = {precision: trained(precision, 16, Path(folder) / precision) for precision in ("fp32", "fp16", "bf16")}
        curves["fp32 accumulated"] = trained("fp32", 8, Path(folder) / "accumulated")
    for precision in ("bf16", "fp16", "fp32 accumulated"):
        for name, what in (("val_loss", "validation loss"), ("loss", f"mean training loss of the last {LAST} steps")):
            full, half = curves["fp32"][name], curves[precision][name]
            record(
                "precision",
                what=f"{precision} beside fp32 after {STEPS} steps, {what}",
                value=abs(half - full) / full,
                unit="of fp32's",
                figure="<= 0.005",
                fp32=round(full, 5),
                other=round(half, 5),
                lr=SPEC["train"]["optimizer"]["lr"],
                step_time_s=round(curves[precision]["step_time_s"], 4),
                fp32_step_time_s=round(curves["fp32"]["step_time_s"], 4),
                skipped_steps=curves[precision]["skipped"],
            )


def trained(precision: str, micro_batch_size: int, directory: Path) -> dict[str, float]:
    """Final losses, median step time and skipped steps of one run."""
    plan = {"precision": precision, "micro_batch_size": micro_batch_size, "global_batch_size": 16}
    outcome = run_attempt(accept({**SPEC, "plan": plan}), read_environment(directory, env={}))
    if outcome.exit_class != "ok":
        raise SystemExit(f"{precision}: {outcome.reason}")
    points = _lines(directory / "rank-0" / "points.jsonl")
    skipped = [
        line for line in _lines(directory / "rank-0" / "events.jsonl") if line["type"] == "overflow_skipped_step"
    ]
    return {
        "loss": statistics.mean(point["values"]["loss"] for point in points[-LAST:]),
        "val_loss": points[-1]["values"]["val_loss"],
        "step_time_s": statistics.median(point["values"]["step_time_s"] for point in points),
        "skipped": len(skipped),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
