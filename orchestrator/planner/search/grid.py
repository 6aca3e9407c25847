"""Plans as a grid of columns: dependent fields as rows, independent ones as further axes.

A term that depends on few axes is computed on those alone, and NumPy broadcasts the result. Does
not depend on bytes, seconds or legality.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.columns.codes import OFFLOAD, PRECISION, RECOMPUTE, SCHEDULE
from orchestrator.planner.model.inputs import plan_columns
from orchestrator.planner.search.axes import Axes
from workers.contracts.specs.plan import ParallelPlan

Rows: TypeAlias = dict[str, NDArray[np.int64]]
_SCHEDULE_NAMES = {code: name for name, code in SCHEDULE.items()}


@dataclass(frozen=True)
class Block:
    """Plans as a grid `(offload, precision, sharding, recompute, sequence_parallel, rows)`.

    `legal` masks the shape, broadcast; None: all plans are legal.
    """

    rows: Rows
    offload: tuple[str, ...]
    precision: tuple[str, ...]
    sharding: tuple[tuple[int, int | None], ...]
    recompute: tuple[str, ...]
    sequence_parallel: tuple[bool, ...]
    legal: NDArray[np.bool_] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""
        axes = (self.offload, self.precision, self.sharding, self.recompute, self.sequence_parallel)
        return (*(len(each) for each in axes), len(self.rows["dp"]))

    @property
    def cells(self) -> int:
        """Number of grid cells."""
        return int(np.prod(self.shape))

    @property
    def size(self) -> int:
        """Number of legal plans."""
        if self.legal is None:
            return self.cells
        return int(self.legal.sum()) * (self.cells // self.legal.size)

    def part(self, start: int, stop: int) -> Block:
        """The rows from `start` to `stop`."""
        rows = {name: column[start:stop] for name, column in self.rows.items()}
        legal = None if self.legal is None else self.legal[..., start:stop]
        return replace(self, rows=rows, legal=legal)

    def columns(self, constants: ParallelPlan, seq_len: int) -> dict[str, Any]:
        """The columns of `inputs.plan_columns`, each on the axes it depends on.

        `constants` holds the fields that are the same for all plans.
        """

        def along(axis: int, values: Sequence[float]) -> NDArray[np.float64]:
            return np.array(values, float).reshape([-1 if each == axis else 1 for each in range(6)])

        row = {name: column.astype(float) for name, column in self.rows.items()}
        copies, global_batch = np.maximum(row["dp_replicate"], 1), constants.global_batch_size
        stashing = (row["schedule"] == SCHEDULE["pipedream"]) & (
            constants.weight_stashing is not False
        )
        return {
            **{name: np.float64(value) for name, value in plan_columns(constants, seq_len).items()},
            **{
                name: row[name]
                for name in (
                    "dp",
                    "tp",
                    "pp",
                    "cp",
                    "ep",
                    "schedule",
                    "virtual_stages",
                    "micro_batch",
                )
            },
            "dp_replicate": copies,
            "dp_shard": row["dp"] / copies,
            "accumulation": global_batch / (row["micro_batch"] * row["dp"]),
            "weight_stashing": stashing.astype(float),
            "nodes": row["nodes"],
            "devices_per_node": row["devices_per_node"],
            "offload": along(0, [OFFLOAD[each] for each in self.offload]),
            "precision": along(1, [PRECISION[each] for each in self.precision]),
            "zero": along(2, [zero for zero, _ in self.sharding]),
            "prefetch_layers": along(
                2, [1 if ahead is None else ahead for _, ahead in self.sharding]
            ),
            "recompute": along(3, [RECOMPUTE[each] for each in self.recompute]),
            "sequence_parallel": along(4, [float(each) for each in self.sequence_parallel])
            * (row["tp"] > 1),
        }

    def fields(self, index: int) -> dict[str, Any]:
        """The plan fields of one cell by its flat index, with `nodes` and `devices_per_node`."""
        offload, precision, sharding, recompute, sequence, at = (
            int(i) for i in np.unravel_index(index, self.shape)
        )
        row = {name: int(column[at]) for name, column in self.rows.items()}
        zero, ahead = self.sharding[sharding]
        return {
            **{
                name: row[name]
                for name in ("dp", "tp", "pp", "cp", "ep", "virtual_stages", "nodes")
            },
            "devices_per_node": row["devices_per_node"],
            "zero": zero,
            "prefetch_layers": ahead,
            "dp_replicate": row["dp_replicate"] or None,
            "schedule": _SCHEDULE_NAMES[row["schedule"]],
            "micro_batch_size": row["micro_batch"],
            "offload": self.offload[offload],
            "precision": self.precision[precision],
            "recompute": self.recompute[recompute],
            "sequence_parallel": self.sequence_parallel[sequence],
        }


@dataclass(frozen=True)
class Space:
    """Legal plans as blocks; `rejected` counts excluded plans by reason, `notes` explains them."""

    blocks: tuple[Block, ...]
    rejected: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of legal plans."""
        return sum(each.size for each in self.blocks)

    def parts(self, cells: int) -> Iterator[Block]:
        """Blocks split into parts of about `cells` plans, so that columns fit in the CPU cache."""
        for block in self.blocks:
            each = max(1, cells // (block.cells // max(1, len(block.rows["dp"]))))
            for start in range(0, len(block.rows["dp"]), each):
                yield block.part(start, start + each)


def constant_plan(global_batch: int, axes: Axes) -> ParallelPlan:
    """A plan with the fields that all plans of the search share; its degrees are placeholders."""
    recompute = axes.recompute[0] if "recompute_budget_bytes" in axes.constants else "none"
    return ParallelPlan.from_dict(
        {**axes.constants, "recompute": recompute, "global_batch_size": global_batch}
    )


def plan_of(fields: dict[str, Any], global_batch: int, axes: Axes) -> ParallelPlan:
    """The plan of one cell's `Block.fields`."""
    own = {
        name: value for name, value in fields.items() if name not in {"nodes", "devices_per_node"}
    }
    return ParallelPlan.from_dict({**axes.constants, **own, "global_batch_size": global_batch})
