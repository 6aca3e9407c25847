"""A pipeline's step as plain data for drawing: one row per operation.

Does not depend on charts.
"""

from __future__ import annotations

from typing import Any

from orchestrator.planner.schedules.simulate import Simulation


def timeline(simulation: Simulation, micro_batches: int = 16) -> dict[str, Any]:
    """`{schedule, devices, virtual_stages, micro_batches, drawn, drawn_s, rows, …}`.

    Rows are those of the first `micro_batches` micro-batches, by device, then time: `{device,
    stage, micro_batch, kind, start_s, end_s}`, plain numbers and strings. `kind` is F, B or W; B is
    the input gradient if a W of the same stage and micro-batch follows, else the full backward.
    `F&B` is a forward overlapped with a full backward and names the latter's `backward_stage` and
    `backward_micro_batch`. `makespan_s` and `bubble_fraction` are those of the full step; `drawn_s`
    is the end of the drawn part.
    """
    kinds = {"F": "F", "B": "B", "I": "B", "W": "W", "FB": "F&B"}
    rows: list[dict[str, Any]] = []
    for event in simulation.events:
        if event.micro_batch >= micro_batches:
            continue
        row: dict[str, Any] = {
            "device": event.device,
            "stage": event.stage,
            "micro_batch": event.micro_batch,
            "kind": kinds[event.kind],
            "start_s": event.start_s,
            "end_s": event.end_s,
        }
        if event.kind == "FB":
            row |= {
                "backward_stage": event.backward_stage,
                "backward_micro_batch": event.backward_micro_batch,
            }
        rows.append(row)
    return {
        "schedule": simulation.schedule,
        "devices": simulation.pp,
        "virtual_stages": simulation.virtual_stages,
        "micro_batches": simulation.micro_batches,
        "drawn": min(micro_batches, simulation.listed),
        "drawn_s": max((row["end_s"] for row in rows), default=0.0),
        "rows": rows,
        "makespan_s": simulation.makespan_s,
        "bubble_fraction": simulation.bubble_fraction,
    }
