"""What turns leave, kept over attempts, and the rows that come of it: medians, spread, difference
to the base.

Plain numbers; knows neither torch nor how a turn is run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from workers.contracts.specs.benchmark_variants import BASE, Variant
from workers.runtime.exits import write_atomically


@dataclass(slots=True)
class Results:
    """`turns`: by variant, what each of its turns left; `failed`: by variant, why it has no
    numbers.

    `under_way` is the variant whose turn had begun when this was written: one that takes the
    attempt down with it is
    not tried again.
    """

    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    devices: dict[str, Any] = field(default_factory=dict)
    under_way: str | None = None

    def save(self, path: Path, spec: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {name: getattr(self, name) for name in ("turns", "failed", "devices", "under_way")}
        write_atomically(path, json.dumps({"spec": spec, **told}))


def earlier(path: Path, spec: dict[str, Any]) -> Results:
    """What earlier attempts at the same benchmark left, or nothing."""
    try:
        told = json.loads(path.read_text())
        if told.pop("spec") != spec:
            return Results()
        found = Results(**told)
    except (OSError, ValueError, KeyError, TypeError):
        return Results()
    if found.under_way is not None:
        found.failed[found.under_way] = "the attempt that tried it ended in the middle"
        found.under_way = None
    return found


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One turn from what its ranks tell: times and losses are alike on all, of memory the fullest
    rank's counts.
    """
    fullest = max(ranks, key=lambda each: each["peak_bytes"])
    return {**ranks[0], "peak_bytes": fullest["peak_bytes"], "memory": fullest["memory"]}


def row(variant: Variant, results: Results, *, seq_len: int) -> dict[str, Any]:
    """One variant's row.

    `deviation`: the largest relative difference of a step's loss to the base's same step.
    """
    found: dict[str, Any] = {
        "id": variant.id,
        "technique": variant.technique,
        "name": variant.name,
        "plan": variant.plan.to_dict(),
    }
    turns = results.turns.get(variant.id, [])
    if variant.id in results.failed or not turns:
        return {
            **found,
            "state": "failed",
            "message": results.failed.get(variant.id, "it was not reached"),
        }
    seconds = [each for turn in turns for each in turn["seconds"]]
    middle = median(seconds)
    low, _, high = (
        quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (middle,) * 3
    )
    losses, base = turns[0]["losses"], results.turns.get(BASE, [{}])[0].get("losses")
    batch = variant.plan.global_batch_size
    fullest = max(turns, key=lambda each: each["peak_bytes"])
    return {
        **found,
        "state": "measured",
        "step_time_s": middle,
        "low_s": low,
        "high_s": high,
        "steps": len(seconds),
        "turns_s": [median(turn["seconds"]) for turn in turns],
        "samples_per_s": batch / middle,
        "tokens_per_s": batch * seq_len / middle,
        "mfu": median([each for turn in turns for each in turn["mfu"]]),
        "peak_bytes": fullest["peak_bytes"],
        "memory": fullest["memory"],
        "loss": losses[-1],
        "deviation": difference(losses, base) if base else None,
    }


def difference(losses: list[float], base: list[float]) -> float:
    """Largest |a - b| / |b| over steps; infinite where a loss is no number."""
    pairs = zip(losses, base, strict=True)
    found = [abs(ours - theirs) / max(abs(theirs), 1e-12) for ours, theirs in pairs]
    return max(each if math.isfinite(each) else math.inf for each in found)
