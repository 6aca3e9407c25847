"""The axes of a search: values of each plan field, fixed by the request or by default.

Does not check which combinations are legal.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from orchestrator.planner.model.columns.codes import SCHEDULE
from workers.contracts.base import Refused, validation_problems
from workers.contracts.catalog.devices import Device
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.plan import INTERLEAVED, V_SHAPED, ParallelPlan

# fields that a search varies; all other fields of a plan keep their fixed value
AXES = (
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "dp_replicate",
    "sequence_parallel",
    "offload",
    "recompute",
    "schedule",
    "virtual_stages",
    "micro_batch_size",
    "precision",
    "prefetch_layers",
)
DEVICES = "devices"
ANY = "any"
MOST_CHUNKS = 8  # default limit of stages per device of interleaved schedules


@dataclass(frozen=True)
class Axes:
    """The values that each axis may take; the degrees follow from divisors.

    `fixed` holds the axes that the request fixes to one or several values; `constants` the fixed
    fields that are not axes. `nodes_only` limits hybrid sharding to shard groups that fill whole
    nodes, `powers_only` micro-batches to powers of two, `most_cp` context parallelism.
    """

    fixed: Mapping[str, tuple[Any, ...]]
    constants: Mapping[str, Any]
    zero: tuple[int, ...]
    prefetch: tuple[int | None, ...]
    sequence_parallel: tuple[bool, ...]
    offload: tuple[str, ...]
    recompute: tuple[str, ...]
    precision: tuple[str, ...]
    schedule: tuple[str, ...]
    nodes_only: bool = False
    powers_only: bool = False
    most_cp: int | None = None
    any_devices: bool = False

    @property
    def sharding(self) -> tuple[tuple[int, int | None], ...]:
        """Pairs of ZeRO stage and prefetched layers; only stage 3 gathers layers ahead of time."""
        if "prefetch_layers" in self.fixed and len(self.prefetch) == 1:
            return tuple((zero, self.prefetch[0]) for zero in self.zero)
        return tuple(
            (zero, ahead)
            for zero in self.zero
            for ahead in (self.prefetch if zero == 3 else (None,))
        )

    def allows(self, name: str, value: Any) -> bool:
        """Whether the axis may take the value."""
        return name not in self.fixed or value in self.fixed[name]

    def chunks(self, schedule: str, pp: int, layers: int) -> tuple[int, ...]:
        """Stages per device for the schedule: those that divide the layers, and always two."""
        if "virtual_stages" in self.fixed:
            return tuple(self.fixed["virtual_stages"])
        if schedule in V_SHAPED:
            return (2,)
        if schedule not in INTERLEAVED:
            return (1,)
        return tuple(v for v in range(2, MOST_CHUNKS + 1) if v == 2 or layers % (pp * v) == 0)

    def schedules(self, pp: int) -> tuple[str, ...]:
        """All schedules; only one without a pipeline, where they are equal."""
        if pp > 1 or ("schedule" in self.fixed and "1f1b" not in self.schedule):
            return self.schedule
        return ("1f1b",)

    def micro_batches(self, share: int) -> tuple[int, ...]:
        """Micro-batch sizes for `share` sequences per data-parallel rank and step."""
        if "micro_batch_size" in self.fixed:
            return tuple(self.fixed["micro_batch_size"])
        return tuple(
            size for size in divisors(share) if not self.powers_only or size & (size - 1) == 0
        )

    def copies(self, dp: int, ranks: int, devices_per_node: int) -> tuple[int, ...]:
        """Values of `dp_replicate` (0: none); `ranks` is tp x cp, the adjacent devices."""
        if "dp_replicate" in self.fixed:
            return tuple(value or 0 for value in self.fixed["dp_replicate"])
        if not any(self.zero):
            return (0,)
        inner = divisors(dp)[1:-1]
        if self.nodes_only:
            inner = tuple(size for size in inner if (dp // size) * ranks == devices_per_node)
        return (0, *inner)

    def coarser(self) -> list[tuple[str, str, Axes]]:
        """Restrictions for a search that is too large, mildest first: `(field, text, axes)`."""
        steps: list[tuple[str, str, dict[str, Any]]] = [
            ("prefetch_layers", "prefetch other than one layer", {"prefetch": (None,)}),
            ("dp_replicate", "hybrid sharding other than within a node", {"nodes_only": True}),
            (
                "schedule",
                "naive, gpipe and pipedream",
                {
                    "schedule": tuple(
                        name
                        for name in self.schedule
                        if name not in {"naive", "gpipe", "pipedream"}
                    )
                },
            ),
            (
                "offload",
                "offload of all states and to nvme",
                {"offload": tuple(name for name in self.offload if name in {"none", "optimizer"})},
            ),
            ("micro_batch_size", "micro-batches other than powers of two", {"powers_only": True}),
            ("cp", "context parallelism over 16 ranks", {"most_cp": 16}),
        ]
        result, axes = [], self
        for name, message, changes in steps:
            if name not in self.fixed:
                axes = replace(axes, **changes)
                result.append((name, message, axes))
        return result


def build_axes(fix: Mapping[str, Any] | None, cluster: ClusterSpec, entry: Device) -> Axes:
    """The axes of a search on this cluster.

    Raises Refused with the field `fix.<name>` for an unknown field or an invalid value.
    """
    fixed, constants = _parse_fix(fix or {})
    is_cpu = entry.kind == "cpu"
    best = next((name for name in ("bf16", "fp16") if not is_cpu and entry.supports(name)), "fp32")

    def chosen(name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        return fixed.get(name, default)

    recompute = chosen("recompute", ("auto",))
    if "auto" in recompute and "recompute_budget_bytes" not in constants:
        recompute = ("none", "selective", "full")
    return Axes(
        fixed=fixed,
        constants=constants,
        zero=chosen("zero", (0, 1, 2, 3)),
        # without prefetch a plan is slower; it is never chosen, only requested
        prefetch=chosen("prefetch_layers", (None, 2)),
        sequence_parallel=chosen("sequence_parallel", (False, True)),
        # on a CPU, device and host share one memory: only a disk is left to offload to
        offload=chosen("offload", ("none",) if is_cpu else ("none", "optimizer", "all", "nvme")),
        recompute=recompute,
        precision=chosen("precision", (best,)),
        schedule=chosen("schedule", tuple(SCHEDULE)),
        any_devices=ANY in fixed.get(DEVICES, ()),
    )


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    result, root = [], 1
    while root * root <= number:
        if number % root == 0:
            result += [root, number // root]
        root += 1
    return tuple(sorted(set(result)))


def _parse_fix(fix: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    fixed: dict[str, tuple[Any, ...]] = {}
    constants: dict[str, Any] = {}
    fields = set(ParallelPlan.model_fields) | {DEVICES}
    for name, value in fix.items():
        if name not in fields or name == "global_batch_size":
            near = difflib.get_close_matches(str(name), fields, n=1) or sorted(AXES)
            raise Refused(
                f"{str(name)[:60]!r} is not an axis of a plan",
                f"Use {' or '.join(near)}.",
                field=f"fix.{name}",
            )
        is_axis = name in AXES or name == DEVICES
        values = (
            tuple(value)
            if isinstance(value, Sequence) and not isinstance(value, str) and is_axis
            else (value,)
        )
        if not values:
            raise Refused(
                f"{name} is fixed to an empty list", "Use at least one value.", field=f"fix.{name}"
            )
        checked = [_validated(name, item) for item in values]
        if not is_axis:
            constants[name] = checked[0]
        else:
            fixed[name] = tuple(dict.fromkeys(checked))
    return fixed, constants


def _validated(name: str, value: Any) -> Any:
    if name == DEVICES:
        if value == ANY or (
            isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**32
        ):
            return value
        raise Refused(
            f"{str(value)[:60]!r} is not a number of devices",
            'Use a number, or "any".',
            field="fix.devices",
        )
    try:
        return getattr(ParallelPlan.from_dict({name: value}), name)
    except ValidationError as error:
        first = validation_problems(error, prefix="fix")[0]
        raise Refused(
            first.message, first.hint or f"Use a value like {_default(name)}.", field=f"fix.{name}"
        ) from None


def _default(name: str) -> Any:
    return getattr(ParallelPlan(), name) if name != "stage_layers" else [1]
