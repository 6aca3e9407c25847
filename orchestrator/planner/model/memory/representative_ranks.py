"""One pipeline rank of each kind, so that a search need not compute all ranks.

A kind has the same layers and edges. Does not depend on memory or time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.model.columns.stage_columns import stage_columns
from orchestrator.planner.model.terms import Column

_PIPELINE = ("pp", "virtual_stages", "schedule")
_MODEL = ("layers", "first_dense", "moe_every")
_NAMES = (
    "stage",
    "stage_layers",
    "stage_moe_layers",
    "stage_dense_layers",
    "stage_first",
    "stage_last",
)


def probe_columns(columns: Mapping[str, Column], n: int) -> dict[str, Column]:
    """Stage columns `(S, n)` as `inputs.stage_columns`, with one rank of each kind.

    Ranks of a kind have as many layers of either sort, with or without embedding and head. For one
    model; `pp`, `virtual_stages` and `schedule` are `(n,)`. The earliest rank of a kind represents
    it, because it has the most micro-batches in flight; in zbv the latest (`schedules.inflight`).
    Rows beyond the kinds of a plan repeat one. A search has few different pipelines.
    """
    pp, virtual, schedule = (
        np.broadcast_to(columns[name], n).astype(np.int64) for name in _PIPELINE
    )
    code = (pp * (int(virtual.max(initial=1)) + 1) + virtual) * len(SCHEDULE) + schedule
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    model = [int(columns[name]) for name in _MODEL]
    kinds = [_kinds(int(pp[at]), int(virtual[at]), int(schedule[at]), *model) for at in first]
    max_kinds = max((ranks.shape[1] for ranks in kinds), default=1)
    stages = np.empty((len(_NAMES), max_kinds, len(kinds)))
    for pipeline, ranks in enumerate(kinds):
        stages[:, : ranks.shape[1], pipeline] = ranks
        stages[:, ranks.shape[1] :, pipeline] = ranks[:, -1:]
    return dict(zip(_NAMES, stages[:, :, which], strict=True))


@lru_cache(maxsize=2**14)
def _kinds(
    pp: int, virtual: int, schedule: int, layers: int, first_dense: int, moe_every: int
) -> NDArray[np.float64]:
    """`(names, kinds)`: stage columns of one pipeline, one rank of each kind."""
    pipeline = dict(
        zip(
            _PIPELINE + _MODEL, (pp, virtual, schedule, layers, first_dense, moe_every), strict=True
        )
    )
    every = stage_columns({name: np.array([value]) for name, value in pipeline.items()}, 1)
    ranks = np.stack([every[name][:, 0] for name in _NAMES])
    latest = schedule == SCHEDULE["zbv"]
    seen = ranks[:, ::-1] if latest else ranks
    _, first = np.unique(seen[1:], axis=1, return_index=True)
    return np.asarray(seen[:, np.sort(first)])
