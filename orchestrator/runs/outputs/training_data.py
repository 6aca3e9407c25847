"""What a fine-tuning run trains on and which parameters it updates, from its events.

Reads the newest attempt that reported it. Computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from orchestrator.runs.models import Run, RunEvent
from workers.contracts import RunSpec
from workers.contracts.wire.samples import TRAINING_ROWS, TrainingRows

_STATISTICS: Final = "data_statistics"
_RECENT_RUNS: Final = 20
_PLAN: Final = "plan_resolved"


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """How many of the model's parameters the run updates, next to an adapter's own.

    `frozen` lists the patterns of `train.freeze`; `adapter` is its method, `storage` the type of
    frozen linear weights if they are quantized.
    """

    total: int
    trained: int
    frozen: list[str]
    adapter: str | None
    storage: str | None


def training_rows(*, run: Run) -> TrainingRows | None:
    """The first rows of the newest attempt; None before the first."""
    for event in RunEvent.objects.filter(run=run, type=TRAINING_ROWS).order_by("-seq")[:2]:
        try:
            return TrainingRows.from_dict(event.data)
        except ValidationError:
            continue
    return None


def data_statistics(*, run: Run) -> dict[str, Any] | None:
    """`{shape, seq_len, sources {name: statistics}}` of the newest attempt; None before it."""
    event = RunEvent.objects.filter(run=run, type=_STATISTICS).order_by("-seq").first()
    data = event.data if event is not None else None
    return data if isinstance(data, dict) and isinstance(data.get("sources"), dict) else None


def trained_share(spec: RunSpec) -> float:
    """The share of positions with loss that a run of equal data, length and packing reported.

    Of the pool's recent runs; 1 if none had them.
    """
    train = spec.train
    if train is None or train.sft is None or spec.data is None:
        return 1.0
    own = (spec.data.to_dict(), train.seq_len, train.sft.to_dict())
    recent = Run.objects.filter(pool_name=spec.resources.pool or "default", kind="train")
    ids = []
    for id, stored in recent.order_by("-id").values_list("id", "spec")[:_RECENT_RUNS]:
        try:
            other = RunSpec.from_dict(stored)
        except ValidationError:
            continue
        body = other.train
        if body is None or body.sft is None or other.data is None:
            continue
        if (other.data.to_dict(), body.seq_len, body.sft.to_dict()) == own:
            ids.append(id)
    events = RunEvent.objects.filter(run_id__in=ids, type=_STATISTICS).order_by("-id")
    for data in events.values_list("data", flat=True)[:4] if ids else ():
        sources = data.get("sources") if isinstance(data, dict) else None
        if not isinstance(sources, dict) or not sources:
            continue
        positions = _total(sources, "rows") * train.seq_len
        trained = _total(sources, "trained_tokens")
        if 0 < trained <= positions:
            return trained / positions
    return 1.0


def _total(sources: dict[str, Any], name: str) -> float:
    """The sum of a statistic over sources; 0 if one lacks it: programs of users write events."""
    values = [each.get(name) for each in sources.values() if isinstance(each, dict)]
    numbers = [each for each in values if isinstance(each, int | float)]
    return float(sum(numbers)) if len(numbers) == len(sources) else 0.0


def trained_parameters(*, run: Run) -> TrainedParameters | None:
    """The counts that the engine reported; None before its start and for other programs."""
    for event in RunEvent.objects.filter(run=run, type=_PLAN).order_by("-seq")[:8]:
        total, trained = event.data.get("parameters"), event.data.get("trained_parameters")
        if isinstance(total, int) and isinstance(trained, int):
            train = run.spec.get("train") or {}
            adapter = train.get("adapter") or {}
            method = (adapter.get("method") or adapter.get("name") or "lora") if adapter else None
            storage = "nf4" if method == "qlora" else adapter.get("quantize")
            return TrainedParameters(
                total, trained, list(train.get("freeze") or []), method, storage
            )
    return None
