"""Loss of bf16, fp16 and fp8 training compared with fp32: 300 steps of Shakespeare, one process.

Three seeds at one learning rate, compared by validation loss on held-out text: the mean over seeds
and the worst seed. fp32 with another micro-batch size is the baseline: it differs only in the order
of sums, so it shows the effect of rounding to 24 bits. Then one seed at twice the rate: a gradient
spike at step 24 makes fp16, whose scale starts at 65536, skip three updates, and its curve stays
those steps behind.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.precision_picture import draw
from tests.bench.record import record
from workers.runtime.environment import read_environment
from workers.training.setup.attempt import run_attempt
from workers.training.setup.spec_loading import accept

STEPS = 300
LAST = 30  # steps whose mean is the final training loss
SEEDS = (1, 2, 3)
LR, HIGHER_LR = 5e-4, 1e-3
FIGURES = {"bf16": 0.005, "fp16": 0.005, "fp8": 0.01, "fp32 accumulated": 0.005}
SPEC: dict[str, Any] = {
    "kind": "train",
    "model": "llama-tiny",
    "train": {
        "steps": STEPS,
        "seq_len": 128,
        "optimizer": {"name": "adamw", "lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "lr_schedule": {"name": "cosine", "warmup_steps": 30, "min_lr": LR / 10},
        "clip_norm": 1.0,
        "eval": {"every_steps": STEPS, "batches": 32},
    },
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: its setting (`how`: a precision or "fp32 accumulated"), losses and step time."""

    how: str
    seed: int
    lr: float
    losses: list[float]
    val_loss: float
    step_time_s: float
    skipped: int

    @property
    def loss(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.mean(self.losses[-LAST:])


def main() -> None:
    runs = [(how, seed, LR) for seed in SEEDS for how in ("fp32", *FIGURES)]
    runs += [(how, SEEDS[0], HIGHER_LR) for how in ("fp32", *FIGURES) if how != "fp32 accumulated"]
    report([train(*run) for run in runs])


def report(curves: list[Curve]) -> None:
    """Writes the rows of results and the picture of the first seed's curves."""
    for lr in (LR, HIGHER_LR):
        same_lr = [curve for curve in curves if curve.lr == lr]
        for how in dict.fromkeys(curve.how for curve in same_lr if curve.how != "fp32"):
            _compare(
                how,
                lr,
                [c for c in same_lr if c.how == how],
                [c for c in same_lr if c.how == "fp32"],
            )
    draw(
        {
            c.how: c.losses
            for c in curves
            if c.seed == SEEDS[0] and c.lr == LR and c.how != "fp32 accumulated"
        }
    )


def _compare(how: str, lr: float, curves: list[Curve], full: list[Curve]) -> None:
    more = {
        "lr": lr,
        "seeds": len(curves),
        "step_time_s": round(statistics.median(c.step_time_s for c in curves), 4),
        "fp32_step_time_s": round(statistics.median(c.step_time_s for c in full), 4),
        "skipped_steps": sum(c.skipped for c in curves),
    }
    for name, what in (
        ("val_loss", "validation loss"),
        ("loss", f"mean training loss of the last {LAST} steps"),
    ):
        pairs = [(getattr(c, name), getattr(f, name)) for c, f in zip(curves, full, strict=True)]
        other, fp32 = (statistics.mean(column) for column in zip(*pairs, strict=True))
        differences = {
            "mean of seeds": abs(other - fp32) / fp32,
            "worst seed": max(abs(c - f) / f for c, f in pairs),
        }
        for which, value in (
            differences.items() if len(pairs) > 1 else [("one seed", differences["worst seed"])]
        ):
            record(
                "precision",
                # row name since version 0.1
                what=f"{how} beside fp32 after {STEPS} steps, {what}, {which}",
                value=value,
                unit="of fp32's",
                figure=f"<= {FIGURES[how]}",
                fp32=round(fp32, 5),
                other=round(other, 5),
                **more,
            )


def train(how: str, seed: int, lr: float) -> Curve:
    """Runs one training from its first to its last step."""
    precision, _, accumulated = how.partition(" ")
    plan = {
        "precision": precision,
        "micro_batch_size": 8 if accumulated else 16,
        "global_batch_size": 16,
    }
    settings = {
        **SPEC["train"],
        "seed": seed,
        "optimizer": {**SPEC["train"]["optimizer"], "lr": lr},
    }
    settings["lr_schedule"] = {**settings["lr_schedule"], "min_lr": lr / 10}
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_attempt(
            accept({**SPEC, "train": settings, "plan": plan}),
            read_environment(Path(folder), env={}),
        )
        if outcome.exit_class != "ok":
            raise SystemExit(f"{how}, seed {seed}: {outcome.reason}")
        points = _lines(Path(folder) / "rank-0" / "points.jsonl")
        events = _lines(Path(folder) / "rank-0" / "events.jsonl")
    return Curve(
        how=how,
        seed=seed,
        lr=lr,
        losses=[point["values"]["loss"] for point in points],
        val_loss=points[-1]["values"]["val_loss"],
        step_time_s=statistics.median(point["values"]["step_time_s"] for point in points),
        skipped=_count("overflow_skipped_step", events),
    )


def _count(type_: str, events: Iterable[dict[str, Any]]) -> int:
    return sum(event["type"] == type_ for event in events)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
