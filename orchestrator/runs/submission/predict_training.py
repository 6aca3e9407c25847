"""What the planner says of a run before it starts: its plan where that was left open, its
prediction, whether it fits.

Pure: knows specs, a venue and the planner; reads no database.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from orchestrator.planner import api
from orchestrator.planner.model.frameworks import Framework, framework
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.requests import Scene, Workload
from orchestrator.planner.search.advice import Change, advise
from orchestrator.planner.search.auto_plan import SYNCHRONOUS, Choice, resolve_auto
from orchestrator.planner.search.axes import AXES
from orchestrator.runs.submission.target_hardware import Venue
from workers.contracts import ModelSpec, ParallelPlan, Problem, RunSpec
from workers.contracts.catalog.devices import DEVICES, GIB, Device
from workers.contracts.specs.plan import SPLIT_BACKWARD
from workers.contracts.specs.training_support import (
    ENGINE_VALUES,
    combination_problems,
    plan_beyond_engine,
)

_STATES = {"adamw8bit": "adam8bit"}  # the planner's word for the same optimizer states
# formulas step by step, as `train.fused_kernels: false` computes them
_PLAIN: dict[str, Any] = {
    "flash_attention": False,
    "fused_softmax": False,
    "fused_norm": False,
    "fused_swiglu": False,
    "without_logits": False,
    "cross_entropy_in_place": False,
}
_MOST_ADVICE = 3
# terms that foretell what metrics of a rank count; of each the largest of all ranks. Activations
# are all
# that autograd keeps, the loss's included
_LARGEST = {
    "params": "params_bytes",
    "grads": "grads_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "saved_for_backward_bytes",
}


@dataclass(frozen=True)
class Prediction:
    """`document` is what the run keeps; `advice` the nearest changes where it does not fit."""

    document: dict[str, Any]
    fits: bool
    advice: list[Change] = field(default_factory=list)

    def problems(self, venue: Venue) -> list[Problem]:
        """What to say where it does not fit; empty where it does, or where nobody knows the
        devices.
        """
        if self.fits or not venue.known:
            return []
        memory = self.document["memory"]
        needs, has = memory["total_bytes"] / GIB, memory["capacity_bytes"] / GIB
        if venue.entry.kind == "cpu":  # what is offloaded stays in the same memory
            needs += self.document["host"]["host_bytes"] / GIB
        message = f"the plan needs {needs:.1f} GiB a device, {venue.entry.name} has {has:.1f} GiB"
        if tries := self.document.get("suggestions"):
            return [Problem(field="model", message=message, hint=str(tries[0]))]
        if not self.advice:
            return [
                Problem(field="plan", message=message, hint="a smaller model, or larger devices")
            ]
        return [
            Problem(field=_field(each), message=message, hint=each.message.rstrip("."))
            for each in self.advice
        ]


def choose(spec: RunSpec, venue: Venue, devices: int) -> Choice:
    """The plan for a training run that leaves it open, among those that the engine runs, on all its
    devices.

    The batch is not the planner's to choose, because what is learned depends on it: a sequence a
    rank, or
    `train.accumulate` of them. Raises Refused where no legal plan exists.
    """
    assert spec.train is not None and spec.shape is not None
    allowed: dict[str, Any] = {
        name: values for name, values in ENGINE_VALUES.items() if name in AXES
    }
    # nothing to offload to where the device is the host; weights that stream cost more than they
    # save unless asked for
    allowed["offload"] = ("none", "optimizer") if venue.entry.kind == "gpu" else ("none",)
    allowed |= {"dp_replicate": None, "prefetch_layers": None, "micro_batch_size": 1}
    gpu, runs = venue.entry.kind == "gpu", ENGINE_VALUES["precision"]
    halves = (
        each for each in ("bf16", "fp16") if gpu and venue.entry.supports(each) and each in runs
    )
    allowed["precision"] = next(halves, "fp32")
    batch = devices * (spec.train.accumulate or 1)
    if spec.train.compile:  # what a compiled block cannot do at all; the rest is `_runs`
        allowed["recompute"] = tuple(each for each in allowed["recompute"] if each != "auto")
        allowed["schedule"] = tuple(each for each in SYNCHRONOUS if each not in SPLIT_BACKWARD)
    scene = _scene(spec, spec.shape, venue, devices, batch)
    return resolve_auto(
        scene, allowed=allowed, calibration=venue.calibration, runs=partial(_runs, spec)
    )


def predict(spec: RunSpec, plan: ParallelPlan, venue: Venue) -> Prediction | None:
    """None for what the planner knows nothing of: other kinds than train, weights whose shape is
    not known.
    """
    if spec.kind != "train" or spec.train is None or spec.shape is None:
        return None
    request = _scene(spec, spec.shape, venue, plan.world_size, plan.global_batch_size).request(plan)
    table = api.table_with([request], venue.calibration)
    [answer] = api.of_table(table, [request], venue.calibration)
    document = {key: value for key, value in answer.items() if key not in ("id", "ok", "problems")}
    document |= {
        "tokens_per_s": answer["tokens_per_s_per_device"] * plan.world_size,
        "largest_bytes": {
            part: round(float(table.column(name).max())) for part, name in _LARGEST.items()
        },
        "device": venue.entry.name,
        "cluster": {**request.cluster.to_dict(), "device": _device(request.entry)},
        "framework": {"name": request.framework.name, "optimizer": request.framework.optimizer},
        "calibration": venue.calibration_name,
        "assumed": not venue.known,
    }
    fits = bool(answer["fits"])
    return Prediction(document, fits, [] if fits else _advice(spec, request, venue))


def _scene(spec: RunSpec, shape: ModelSpec, venue: Venue, devices: int, batch: int) -> Scene:
    assert spec.train is not None
    tokens = float(spec.train.steps * batch * spec.train.seq_len)
    work = Workload(seq_len=spec.train.seq_len, global_batch_size=batch, tokens=tokens)
    return Scene(shape, venue.cluster(devices), work, _framework(spec), venue.device(devices))


def _framework(spec: RunSpec) -> Framework:
    assert spec.train is not None
    optimizer = spec.train.optimizer
    states = _STATES.get(optimizer.name, optimizer.name)
    if optimizer.name == "sgd" and optimizer.momentum:
        states = "lion"  # one moment a parameter, as momentum is
    return replace(
        framework("orrery"), optimizer=states, **({} if spec.train.fused_kernels else _PLAIN)
    )


def _device(entry: Device) -> str | dict[str, Any]:
    """Its name where it is as the catalogue has it, else the whole entry: a measurement of it must
    say what it was.
    """
    return entry.name if entry == DEVICES[entry.name] else entry.to_dict()


def _advice(spec: RunSpec, request: Request, venue: Venue) -> list[Change]:
    """Changes that the engine can run, on devices that the pool has first."""
    found = [each for each in advise(request, venue.calibration) if _runs(spec, each.plan)]
    return found[:_MOST_ADVICE]


def _runs(spec: RunSpec, plan: ParallelPlan) -> bool:
    """Whether the engine runs such a plan with what else the spec asks for."""
    return not plan_beyond_engine(plan) and not combination_problems(
        spec.model_copy(update={"plan": plan})
    )


def _field(change: Change) -> str:
    name = next(iter(change.changes), "")
    return (
        f"plan.{name}"
        if name in ParallelPlan.model_fields
        else "train.seq_len"
        if name == "seq_len"
        else "plan"
    )
