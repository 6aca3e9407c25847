"""Columns of pipeline ranks: which layers they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.model.terms import Column


def stage_columns(
    columns: Mapping[str, Column],
    n: int,
    *,
    given_layers: Sequence[Sequence[int] | None] | None = None,
) -> dict[str, Column]:
    """`(S, n)` columns of pipeline ranks: index, layers, whether it holds the first and last stage.

    A pipeline rank holds `virtual_stages` stages: chunk k of rank r is stage k·pp + r, and in
    V-shaped schedules (zbv, dualpipev) chunk 1 is stage 2·pp - 1 - r. Rows beyond pp repeat the
    last rank. `given_layers` are the plans' own `stage_layers`.
    """
    pp, virtual = np.broadcast_to(columns["pp"], n), np.broadcast_to(columns["virtual_stages"], n)
    schedule, layers = (
        np.broadcast_to(columns["schedule"], n),
        np.broadcast_to(columns["layers"], n),
    )
    most = int(pp.max()) if n else 1
    rank = np.minimum(np.arange(most)[:, None], pp - 1)
    folded = (schedule == SCHEDULE["zbv"]) | (schedule == SCHEDULE["dualpipev"])
    stages = pp * virtual
    each, more = layers // stages, layers % stages
    held, routed = np.zeros(rank.shape), np.zeros(rank.shape)
    first_dense, every = (
        np.broadcast_to(columns["first_dense"], n),
        np.broadcast_to(columns["moe_every"], n),
    )
    for chunk in range(int(virtual.max()) if n else 0):
        stage = np.where(folded & (chunk == 1), stages - 1 - rank, chunk * pp + rank)
        size, start = each + (stage < more), stage * each + np.minimum(stage, more)
        for column, own in enumerate(given_layers or ()):
            if own is not None and chunk < virtual[column]:
                sums = np.concatenate([[0], np.cumsum(own)])
                index = stage[:, column].astype(int)
                size[:, column], start[:, column] = sums[index + 1] - sums[index], sums[index]
        exists = chunk < virtual
        held += size * exists
        routed += (
            _routed(start + size, first_dense, every) - _routed(start, first_dense, every)
        ) * exists
    last = np.where(folded, rank == 0, rank == pp - 1)
    return {
        "stage": rank,
        "stage_layers": held,
        "stage_moe_layers": routed,
        "stage_dense_layers": held - routed,
        "stage_first": (rank == 0).astype(float),
        "stage_last": last.astype(float),
    }


def _routed(layer: Column, first_dense: Column, every: Column) -> Column:
    """How many of the layers before `layer` route tokens to experts."""
    return np.asarray(np.maximum(0, np.ceil((layer - first_dense) / every)))
