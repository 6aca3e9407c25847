"""Results of repeats, stored across attempts, and table rows: medians, spread, deviation from the
base.

Plain numbers; does not depend on torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from workers.contracts.specs.benchmarks.variants import BASE, Variant
from workers.runtime.exit_codes import write_atomically


@dataclass(slots=True)
class Results:
    """`repeats`: results by variant, one per repeat; `failed`: the reason by variant.

    `in_progress` is the variant whose repeat had begun when this was written: one that crashes the
    attempt is not retried.
    """

    repeats: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    devices: dict[str, Any] = field(default_factory=dict)
    in_progress: str | None = None

    def save(self, path: Path, spec: dict[str, Any]) -> None:
        """Write the results and the spec that they belong to."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"spec": spec, **asdict(self)}))


def load_earlier(path: Path, spec: dict[str, Any]) -> Results:
    """Results of earlier attempts at the same benchmark, or empty ones."""
    try:
        document = json.loads(path.read_text())
        if document.pop("spec") != spec:
            return Results()
        if "turns" in document:  # version 0.1 wrote `turns` and `under_way`
            document["repeats"] = document.pop("turns")
            document["in_progress"] = document.pop("under_way")
        results = Results(**document)
    except (OSError, ValueError, KeyError, TypeError):
        return Results()
    if results.in_progress is not None:
        results.failed[results.in_progress] = "the attempt ended while it was measured"
        results.in_progress = None
    return results


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One repeat from its ranks' results: the first rank's, with the memory of the fullest rank."""
    fullest = max(ranks, key=lambda each: each["peak_bytes"])
    return {**ranks[0], "peak_bytes": fullest["peak_bytes"], "memory": fullest["memory"]}


def row(variant: Variant, results: Results, *, seq_len: int) -> dict[str, Any]:
    """One variant's row; `deviation` is the largest relative difference of a step's loss to the
    base's.
    """
    head: dict[str, Any] = {
        "id": variant.id,
        "technique": variant.technique,
        "name": variant.name,
        "plan": variant.plan.to_dict(),
    }
    repeats = results.repeats.get(variant.id, [])
    if variant.id in results.failed or not repeats:
        return {
            **head,
            "state": "failed",
            "message": results.failed.get(variant.id, "it was not measured"),
        }
    seconds = [each for repeat in repeats for each in repeat["seconds"]]
    middle = median(seconds)
    low, _, high = (
        quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (middle,) * 3
    )
    losses, base = repeats[0]["losses"], results.repeats.get(BASE, [{}])[0].get("losses")
    batch = variant.plan.global_batch_size
    fullest = max(repeats, key=lambda each: each["peak_bytes"])
    return {
        **head,
        "state": "measured",
        "step_time_s": middle,
        "low_s": low,
        "high_s": high,
        "steps": len(seconds),
        "turns_s": [median(repeat["seconds"]) for repeat in repeats],
        "samples_per_s": batch / middle,
        "tokens_per_s": batch * seq_len / middle,
        "mfu": median([each for repeat in repeats for each in repeat["mfu"]]),
        "peak_bytes": fullest["peak_bytes"],
        "memory": fullest["memory"],
        "loss": losses[-1],
        "deviation": difference(losses, base) if base else None,
    }


def difference(losses: list[float], base: list[float]) -> float:
    """Largest |a - b| / |b| over steps; infinite if a loss is not finite."""
    pairs = zip(losses, base, strict=True)
    differences = [abs(ours - theirs) / max(abs(theirs), 1e-12) for ours, theirs in pairs]
    return max(each if math.isfinite(each) else math.inf for each in differences)
