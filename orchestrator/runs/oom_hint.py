"""Adds the memory prediction of a run's submission to the reason of its out-of-memory exit.

Reads the run's first events and its prediction; does not call the planner.
"""

from __future__ import annotations

from orchestrator.runs.models import Run, RunEvent
from workers.contracts.catalog.units import GIB, format_gib


def with_memory_hint(run: Run, reason: str) -> str:
    """The reason of an out-of-memory exit, extended by the prediction if there is one."""
    hint = _misfit(run) or _predicted(run)
    return f"{reason.rstrip('. ')}. {hint}" if hint else reason


def _misfit(run: Run) -> str:
    """The hint for a run that was submitted with `force`."""
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
    message = f"{needs / GIB:.1f} of {format_gib(has)} per device were predicted"
    learns = run.kind in ("train", "benchmark")
    return (
        f"{message}. Use "
        f"{'more recomputation or a higher ZeRO stage' if learns else 'fewer sequences or blocks'}."
    )
