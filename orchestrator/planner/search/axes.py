"""What a search may choose: the values of each axis, those a person fixed and the defaults for the
rest.

Knows fields of a plan and what a device supports; nothing of which combinations are legal.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from orchestrator.planner.model.inputs import SCHEDULE
from workers.contracts.base import Refused, validation_problems
from workers.contracts.catalog.devices import Device
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.plan import INTERLEAVED, V_SHAPED, ParallelPlan

# fields that a search varies; all other fields of a plan stay as fixed
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
MOST_CHUNKS = 8  # stages a device of interleaved schedules, unless asked for


@dataclass(frozen=True)
class Axes:
    """The values each axis may take, `None` where they follow from the others (divisors).

    `given` are the fields that the asker fixed to one value or several; `constants` the fixed
    fields that are no axis.
    `nodes_only` keeps of the hybrid shardings those whose shard group fills whole nodes;
    `powers_only` keeps of the
    micro-batches powers of two; `most_cp` bounds context parallelism.
    """

    given: Mapping[str, tuple[Any, ...]]
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
    without: Mapping[str, int] = field(default_factory=dict)

    @property
    def sharding(self) -> tuple[tuple[int, int | None], ...]:
        """Pairs of ZeRO stage and prefetched layers; only stage 3 gathers layers ahead of time."""
        if "prefetch_layers" in self.given and len(self.prefetch) == 1:
            return tuple((zero, self.prefetch[0]) for zero in self.zero)
        return tuple(
            (zero, ahead)
            for zero in self.zero
            for ahead in (self.prefetch if zero == 3 else (None,))
        )

    def allows(self, name: str, value: Any) -> bool:
        return name not in self.given or value in self.given[name]

    def chunks(self, schedule: str, pp: int, layers: int) -> tuple[int, ...]:
        """Stages a device that the schedule runs with: all that the layers divide into, and two in
        any case.
        """
        if "virtual_stages" in self.given:
            return tuple(self.given["virtual_stages"])
        if schedule in V_SHAPED:
            return (2,)
        if schedule not in INTERLEAVED:
            return (1,)
        return tuple(v for v in range(2, MOST_CHUNKS + 1) if v == 2 or layers % (pp * v) == 0)

    def schedules(self, pp: int) -> tuple[str, ...]:
        """Without a pipeline all schedules are one."""
        if pp > 1 or ("schedule" in self.given and "1f1b" not in self.schedule):
            return self.schedule
        return ("1f1b",)

    def micro_batches(self, share: int) -> tuple[int, ...]:
        """Micro-batch sizes for `share` sequences a data-parallel rank and step."""
        if "micro_batch_size" in self.given:
            return tuple(self.given["micro_batch_size"])
        return tuple(
            each for each in divisors(share) if not self.powers_only or each & (each - 1) == 0
        )

    def copies(self, dp: int, ranks: int, devices_per_node: int) -> tuple[int, ...]:
        """Values of `dp_replicate` (0: none), `ranks` being the devices beside dp that lie next to
        each other.
        """
        if "dp_replicate" in self.given:
            return tuple(each or 0 for each in self.given["dp_replicate"])
        if not any(self.zero):
            return (0,)
        inner = divisors(dp)[1:-1]
        if self.nodes_only:
            inner = tuple(each for each in inner if (dp // each) * ranks == devices_per_node)
        return (0, *inner)

    def coarser(self) -> list[tuple[str, str, Axes]]:
        """What a search that would be too large leaves out, mildest first: field, in words, and the
        axes then.
        """
        steps: list[tuple[str, str, dict[str, Any]]] = [
            ("prefetch_layers", "prefetch other than one layer", {"prefetch": (None,)}),
            ("dp_replicate", "hybrid sharding other than within a node", {"nodes_only": True}),
            (
                "schedule",
                "naive, gpipe and pipedream",
                {
                    "schedule": tuple(
                        each
                        for each in self.schedule
                        if each not in {"naive", "gpipe", "pipedream"}
                    )
                },
            ),
            (
                "offload",
                "offload of all states and to nvme",
                {"offload": tuple(each for each in self.offload if each in {"none", "optimizer"})},
            ),
            ("micro_batch_size", "micro-batches other than powers of two", {"powers_only": True}),
            ("cp", "context parallelism over 16 ranks", {"most_cp": 16}),
        ]
        found, now = [], self
        for name, message, changes in steps:
            if name not in self.given:
                now = replace(now, **changes)
                found.append((name, message, now))
        return found


def axes(fix: Mapping[str, Any] | None, cluster: ClusterSpec, entry: Device) -> Axes:
    """Raises Refused naming the field `fix.<name>` for an unknown field or a value that no plan can
    have.
    """
    given, constants = _read(fix or {})
    is_cpu = entry.kind == "cpu"
    best = next((name for name in ("bf16", "fp16") if not is_cpu and entry.supports(name)), "fp32")

    def chosen(name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        return given.get(name, default)

    recompute = chosen("recompute", ("auto",))
    if "auto" in recompute and "recompute_budget_bytes" not in constants:
        recompute = ("none", "selective", "full")
    return Axes(
        given=given,
        constants=constants,
        zero=chosen("zero", (0, 1, 2, 3)),
        prefetch=chosen("prefetch_layers", (None, 0, 2)),
        sequence_parallel=chosen("sequence_parallel", (False, True)),
        # on a CPU device and host share one memory, there is nowhere to offload to but a disk
        offload=chosen("offload", ("none",) if is_cpu else ("none", "optimizer", "all", "nvme")),
        recompute=recompute,
        precision=chosen("precision", (best,)),
        schedule=chosen("schedule", tuple(SCHEDULE)),
        any_devices=ANY in given.get(DEVICES, ()),
    )


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    found, root = [], 1
    while root * root <= number:
        if number % root == 0:
            found += [root, number // root]
        root += 1
    return tuple(sorted(set(found)))


def _read(fix: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    given: dict[str, tuple[Any, ...]] = {}
    constants: dict[str, Any] = {}
    fields = set(ParallelPlan.model_fields) | {DEVICES}
    for name, value in fix.items():
        if name not in fields or name == "global_batch_size":
            near = difflib.get_close_matches(str(name), fields, n=1) or sorted(AXES)
            raise Refused(
                f"{str(name)[:60]!r} is not an axis of a plan", ", ".join(near), field=f"fix.{name}"
            )
        is_axis = name in AXES or name == DEVICES
        values = (
            tuple(value)
            if isinstance(value, Sequence) and not isinstance(value, str) and is_axis
            else (value,)
        )
        if not values:
            raise Refused(
                f"{name} is fixed to no value at all", "at least one", field=f"fix.{name}"
            )
        checked = [_checked(name, each) for each in values]
        if not is_axis:
            constants[name] = checked[0]
        else:
            given[name] = tuple(dict.fromkeys(checked))
    return given, constants


def _checked(name: str, value: Any) -> Any:
    if name == DEVICES:
        if value == ANY or (
            isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**32
        ):
            return value
        raise Refused(
            f"{str(value)[:60]!r} is not a number of devices",
            'a number, or "any"',
            field="fix.devices",
        )
    try:
        return getattr(ParallelPlan.from_dict({name: value}), name)
    except ValidationError as error:
        found = validation_problems(error, prefix="fix")[0]
        raise Refused(
            found.message, found.hint or f"a value like {_usual(name)}", field=f"fix.{name}"
        ) from None


def _usual(name: str) -> Any:
    return getattr(ParallelPlan(), name) if name != "stage_layers" else [1]
