"""One pipeline rank of each kind that a plan has, so that a search need not look at all of them.

Knows how layers are spread and which ranks have more micro-batches in flight, not what either
weighs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.inputs import SCHEDULE, stage_columns
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
    """`(S, n)` columns as `inputs.stage_columns` gives, one rank of each kind: as many layers of
    either sort, with or
    without embedding and head. One model's; `pp`, `virtual_stages` and `schedule` are `(n,)`.

    Of ranks of a kind it is the earliest, which has as many micro-batches in flight or more than
    the others; in zbv the
    latest (`schedules.inflight`). Rows beyond the kinds of a plan repeat one. A search has few
    different pipelines.
    """
    pp, virtual, schedule = (
        np.broadcast_to(columns[name], n).astype(np.int64) for name in _PIPELINE
    )
    code = (pp * (int(virtual.max(initial=1)) + 1) + virtual) * len(SCHEDULE) + schedule
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    model = [int(columns[name]) for name in _MODEL]
    found = [_kinds(int(pp[at]), int(virtual[at]), int(schedule[at]), *model) for at in first]
    most = max((each.shape[1] for each in found), default=1)
    stages = np.empty((len(_NAMES), most, len(found)))
    for pipeline, ranks in enumerate(found):
        stages[:, : ranks.shape[1], pipeline] = ranks
        stages[:, ranks.shape[1] :, pipeline] = ranks[:, -1:]
    return dict(zip(_NAMES, stages[:, :, which], strict=True))


@lru_cache(maxsize=2**14)
def _kinds(
    pp: int, virtual: int, schedule: int, layers: int, first_dense: int, moe_every: int
) -> NDArray[np.float64]:
    """`(names, kinds)`: the stage columns of one pipeline's ranks, those of a kind but once."""
    given = dict(
        zip(
            _PIPELINE + _MODEL, (pp, virtual, schedule, layers, first_dense, moe_every), strict=True
        )
    )
    every = stage_columns({name: np.array([value]) for name, value in given.items()}, 1)
    ranks = np.stack([every[name][:, 0] for name in _NAMES])
    latest = schedule == SCHEDULE["zbv"]
    seen = ranks[:, ::-1] if latest else ranks
    _, first = np.unique(seen[1:], axis=1, return_index=True)
    return np.asarray(seen[:, np.sort(first)])
