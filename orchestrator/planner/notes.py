"""What a person should know before taking a ranked plan: another algorithm, or memory that no catalogue holds.

Reads predictions of plans that were chosen; knows no formula and ranks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.planner.inputs import Request, table_of
from workers.contracts.devices import GIB

_STATES = ("params_bytes", "grads_bytes", "optimizer_bytes")


def warnings(ranked: Sequence[Request], parameters: Mapping[str, Any]) -> list[str]:
    """Sentences on plans, best first, which they name by their rank. `parameters` as a search's."""
    notes = []
    stale = [str(place) for place, each in enumerate(ranked, 1) if each.plan.schedule == "pipedream"]
    if stale:
        which = ", ".join(stale[:6]) + (" and others" if len(stale) > 6 else "")
        notes.append(
            f"Number {which}: pipedream updates weights with stale gradients, which trains differently from all other "
            "schedules; fix schedule to leave it out."
        )
    away = (each for each in enumerate(ranked, 1) if each[1].plan.offload in {"optimizer", "all"})
    for place, request in away:
        notes.append(
            f"Number {place} keeps {host_bytes(request, parameters) / GIB:,.0f} GiB of states in the memory of each "
            "host, which the catalogue does not know: that a plan fits is said of the devices alone."
        )
        break
    return notes


def host_bytes(request: Request, parameters: Mapping[str, Any]) -> float:
    """Bytes that a node's host holds for all its devices: states that are on them without offloading and not with it.

    Of the pipeline rank that holds most; staging buffers aside.
    """
    here = replace(request, plan=request.plan.model_copy(update={"offload": "none"}))
    table = table_of([here, request], parameters)
    held = np.sum([np.atleast_2d(table.column(name)) for name in _STATES], axis=0)
    devices = min(request.plan.world_size, request.cluster.devices_per_node)
    return float((held[:, 0] - held[:, 1]).max()) * devices
