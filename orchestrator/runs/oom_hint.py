"""What a person was told of a run's memory at its submit, repeated when it runs out: the numbers,
and what would fit.

Knows the run's first events and its prediction; asks the planner nothing anew.
"""

from __future__ import annotations

from orchestrator.runs.models import Run, RunEvent
from workers.contracts.catalog.devices import GIB


def with_warning(run: Run, reason: str) -> str:
    """The reason of an end for want of memory, and what was predicted; as it is where nobody
    predicted anything.
    """
    told = _misfit(run) or _predicted(run)
    return f"{reason.rstrip('. ')}. {told}" if told else reason


def _misfit(run: Run) -> str:
    """Of a run that was submitted all the same."""
    resolved = RunEvent.objects.filter(run=run, type="plan_resolved").order_by("seq").first()
    misfits = (resolved.data.get("misfits") or []) if resolved is not None else []
    return (
        f"It was submitted against the planner's advice: {'; or '.join(misfits[:2])}."
        if misfits
        else ""
    )


def _predicted(run: Run) -> str:
    memory = (run.prediction or {}).get("memory") or {}
    needs, has = memory.get("total_bytes"), memory.get("capacity_bytes")
    if not needs or not has:
        return ""
    message = f"{needs / GIB:.1f} of {has / GIB:.1f} GiB a device were predicted"
    learns = run.kind in ("train", "benchmark")
    return (
        f"{message}: try "
        f"{'more recomputation or a higher ZeRO stage' if learns else 'fewer sequences or blocks'}."
    )
