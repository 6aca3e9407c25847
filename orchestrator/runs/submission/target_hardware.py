"""The devices that a run would get: those of its pool, with rates that probes or runs measured.

Also what the pool's nodes cannot do: images, and limits of runs. If the pool has no known device,
the catalogue's nominal one is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.fleet import selectors as fleet
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.store import node_probes
from orchestrator.planner.store.node_probes import usable_default
from orchestrator.runs.models import Run, RunEvent
from workers.contracts import ClusterSpec, RunSpec
from workers.contracts.base import Problem, problem
from workers.contracts.catalog.devices import DEVICES, Device
from workers.contracts.wire.event_bodies import body_problem

_RECENT_RUNS = 20  # of the pool, searched for measured peaks
_VERBS = {
    "images": "run images",
    "limits": "limit memory, CPU time or processes",
    "limits of images": "limit memory, CPU time or processes of images",
}
_INSTALL = {
    "images": "install Docker or Apptainer",
    "limits": "run its agent under systemd",
    "limits of images": "install Docker, or run its agent under systemd",
}
_LIMITS = ("memory_gb", "cpus", "processes")
_PROBED = {"peak_tflops", "memory_gb_per_s", "intra_node_gb_per_s"}


@dataclass(frozen=True)
class TargetHardware:
    """`entry` is the catalogue's device with the real devices' memory and measured peaks.

    `known` is false if the pool has no known device: then no plan is refused.
    """

    entry: Device
    per_node: int
    known: bool
    cores: int | None = None  # of a node with CPU slots
    calibration: Calibration | None = None
    calibration_name: str | None = None
    notes: tuple[str, ...] = ()  # on probes and calibrations
    # TFLOP/s by precision that recent runs of the pool measured, as they divide for their MFU
    run_peaks: dict[str, float] = field(default_factory=dict)

    def device(self, devices: int) -> Device:
        """One of `devices` devices; ranks beyond a node's cores share them."""
        ranks = self.cluster(devices).devices_per_node
        if self.cores is None or ranks <= self.cores:
            return self.entry
        slower = {name: peak * self.cores / ranks for name, peak in self.entry.peak_tflops.items()}
        return self.entry.model_copy(update={"peak_tflops": slower})

    def mfu_peak_tflops(self, precision: str, devices: int) -> float:
        """TFLOP/s of one of `devices` devices that MFU divides by.

        The datasheet's for GPUs; for CPUs the largest that a probe or a recent run measured, since
        load lowers a measurement.
        """
        peak = self.device(devices).peak(precision)
        measured = self.run_peaks.get(precision, 0.0)
        return max(peak, measured * peak / self.entry.peak(precision))

    def cluster(self, devices: int) -> ClusterSpec:
        """A cluster with this many devices on as few nodes as equal shares allow."""
        most = min(devices, self.per_node, 2**16)
        per_node = next(number for number in range(most, 0, -1) if devices % number == 0)
        nodes = min(devices // per_node, 2**16)
        return ClusterSpec(device=self.entry.name, nodes=nodes, devices_per_node=per_node)


def target_hardware_for(spec: RunSpec) -> TargetHardware:
    """The hardware of the spec's pool, with the default calibration of its device."""
    pool = spec.resources.pool or "default"
    offer = fleet.offer(pool=pool, catalogue=spec.resources.device)
    name = (
        offer.catalogue if offer and offer.catalogue in DEVICES else spec.resources.device or "cpu"
    )
    entry, per_node = DEVICES[name], 8
    peaks: dict[str, float] = {}
    if offer is not None and offer.catalogue == name:
        per_node = offer.per_node
        changes: dict[str, object] = {"memory_bytes": offer.memory_bytes or entry.memory_bytes}
        if entry.kind == "cpu":
            peaks = _measured_peaks(pool)
            changes["peak_tflops"] = entry.peak_tflops | peaks
        entry = entry.model_copy(update=changes)
    cores = offer.cores if offer and entry.kind == "cpu" else None
    calibration, called, notes = usable_default(device=name)
    probed = None
    if offer is not None and offer.catalogue == name and calibration is None:
        probed = node_probes.probed_device(catalogue=name, pool=pool)
    if probed is not None:
        notes += probed.notes
        if probed.name is not None:
            # its parameters relate to the rates that it measured
            entry = entry.model_copy(update=probed.entry.model_dump(include=_PROBED))
            calibration, called = probed.calibration, probed.name
    return TargetHardware(
        entry, per_node, offer is not None, cores, calibration, called, tuple(notes), peaks
    )


def _measured_peaks(pool: str) -> dict[str, float]:
    """TFLOP/s by precision that recent runs of the pool measured: the maximum, since load lowers
    it.
    """
    recent = Run.objects.filter(pool_name=pool, kind__in=("train", "benchmark")).order_by("-id")
    runs = list(recent.values_list("id", flat=True)[:_RECENT_RUNS])
    rows = (
        RunEvent.objects.filter(run_id__in=runs, type="peak_measured")
        .order_by("-id")
        .values_list("data", flat=True)
    )
    peaks: dict[str, float] = {}
    for data in rows[: 4 * _RECENT_RUNS]:
        if body_problem("peak_measured", data) is not None:
            continue  # of a release that did not validate it
        precision, peak = data.get("precision"), data["tflops"]
        if precision in ("fp32", "bf16", "fp16"):
            # a CPU multiplies fp16 in fp32: one peak, whichever was measured
            for name in ("fp32", "fp16") if precision != "bf16" else ("bf16",):
                peaks[name] = max(float(peak), peaks.get(name, 0.0))
    return peaks


def support_problems(spec: RunSpec) -> list[Problem]:
    """One problem per field that the nodes of the pool do not support.

    Empty for a pool without nodes, whose runs wait for one, and for pools of engines.
    """
    needs = spec.resources.needs
    if not needs or spec.kind == "external":
        return []
    pool = spec.resources.pool or "default"
    problems = []
    for need in fleet.unsupported_needs(pool=pool, needs=needs):
        limits = [name for name in _LIMITS if getattr(spec.resources, name) is not None]
        field = "image" if need == "images" else limits[0]
        problems.append(
            problem(
                f"resources.{field}",
                f"no node of pool {pool} can {_VERBS[need]}",
                (
                    f"Choose another pool, or {_INSTALL[need]} on a node. To queue the run anyway, "
                    "submit it with force."
                ),
            )
        )
    return problems
