"""The planner's plan and prediction for a training run at its submission. Reads no database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from orchestrator.planner import answers
from orchestrator.planner.model.finetuning.rollout_columns import rollouts_of
from orchestrator.planner.model.frameworks import Framework, framework
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.terms import Table
from orchestrator.planner.plan_request import Scenario, Workload
from orchestrator.planner.search.advice.advise import PlanChange, advise
from orchestrator.planner.search.auto_plan import SYNCHRONOUS, Choice, resolve_auto
from orchestrator.planner.search.axes import AXES
from orchestrator.runs.outputs.training_data import trained_share
from orchestrator.runs.submission.target_hardware import TargetHardware
from workers.contracts import ModelSpec, ParallelPlan, Problem, RunSpec
from workers.contracts.catalog.devices import DEVICES, Device
from workers.contracts.catalog.units import GIB
from workers.contracts.specs.plan import SPLIT_BACKWARD
from workers.contracts.specs.train import TrainBody
from workers.contracts.specs.training_support import (
    ENGINE_VALUES,
    combination_problems,
    plan_engine_problems,
)

_STATES = {"adamw8bit": "adam8bit"}  # the planner's name for the same optimizer states
# `train.fused_kernels: false`
_UNFUSED: dict[str, Any] = {
    "flash_attention": False,
    "fused_softmax": False,
    "fused_norm": False,
    "fused_swiglu": False,
    "without_logits": False,
    "cross_entropy_in_place": False,
}
_MAX_ADVICE = 3
# micro-batches of policy optimization: rows are short, and their number does not change an update
_ANSWERS_AT_ONCE = (1, 4, 16, 64)
_UNKNOWN_TEACHER = (
    "The teacher's memory and time are not counted: the shape of its weights cannot be read here."
)
# predicted terms of a rank's memory metrics, each the maximum over ranks; activations are all
# tensors that autograd saves, including the loss's
_LARGEST = {
    "params": "params_bytes",
    "reference": "reference_bytes",
    "grads": "grads_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "saved_for_backward_bytes",
}


@dataclass(frozen=True)
class Prediction:
    """`document` is stored with the run; `advice`: the nearest changes if it does not fit."""

    document: dict[str, Any]
    fits: bool
    advice: list[PlanChange] = field(default_factory=list)

    def problems(self, hardware: TargetHardware) -> list[Problem]:
        """The problems of a plan that does not fit; empty if it fits or the devices are unknown."""
        if self.fits or not hardware.known:
            return []
        memory = self.document["memory"]
        needs, has = memory["total_bytes"] / GIB, memory["capacity_bytes"] / GIB
        if hardware.entry.kind == "cpu":  # offloaded tensors stay in the same memory
            needs += self.document["host"]["host_bytes"] / GIB
        message = (
            f"the plan needs {needs:.1f} GiB per device, {hardware.entry.name} has {has:.1f} GiB"
        )
        if suggestions := self.document.get("suggestions"):
            return [Problem(field="model", message=message, hint=f"Use {suggestions[0]}.")]
        if not self.advice:
            return [
                Problem(
                    field="plan", message=message, hint="Use a smaller model, or larger devices."
                )
            ]
        return [
            Problem(field=_field(change), message=message, hint=change.message)
            for change in self.advice
        ]


def choose_plan(
    spec: RunSpec,
    hardware: TargetHardware,
    devices: int,
    teacher: ModelSpec | None = None,
    *,
    count: int = 1,
) -> Choice:
    """The fastest plan that the engine supports and that fits, on all devices of the run.

    The batch is fixed, because training results depend on it: one sequence per rank, or
    `train.accumulate`. `teacher` is the shape of the teacher, if it is known. With `count` above 1
    the next fastest plans are candidates. Raises Refused if no plan is legal.
    """
    assert spec.train is not None and spec.trained_shape is not None
    allowed: dict[str, Any] = {
        name: values for name, values in ENGINE_VALUES.items() if name in AXES
    }
    # no offloading if the device is the host; streamed weights cost more than they save
    allowed["offload"] = ("none", "optimizer") if hardware.entry.kind == "gpu" else ("none",)
    allowed |= {"dp_replicate": None, "prefetch_layers": None, "micro_batch_size": 1}
    half_precisions = (
        precision
        for precision in ("bf16", "fp16")
        if hardware.entry.kind == "gpu"
        and hardware.entry.supports(precision)
        and precision in ENGINE_VALUES["precision"]
    )
    allowed["precision"] = next(half_precisions, "fp32")
    batch = devices * (spec.train.accumulate or 1)
    if spec.train.policy is not None:
        batch = spec.train.policy.rows_per_update
        allowed["micro_batch_size"] = _ANSWERS_AT_ONCE
    if (
        spec.train.compile
    ):  # values that never work with compiled blocks; `_is_supported` checks the rest
        allowed["recompute"] = tuple(mode for mode in allowed["recompute"] if mode != "auto")
        allowed["schedule"] = tuple(name for name in SYNCHRONOUS if name not in SPLIT_BACKWARD)
    scenario = _scenario(spec, spec.trained_shape, hardware, devices, batch, teacher)
    return resolve_auto(
        scenario,
        allowed=allowed,
        calibration=hardware.calibration,
        runs=partial(_is_supported, spec),
        count=count,
    )


def predict_training(
    spec: RunSpec,
    plan: ParallelPlan,
    hardware: TargetHardware,
    teacher: ModelSpec | None = None,
    *,
    unknown_teacher: bool = False,
) -> Prediction | None:
    """The prediction of a training run; None for other kinds and unknown model shapes.

    `teacher` is the shape of the second model of a distillation. An `unknown_teacher` is noted:
    the prediction then leaves out its memory and time.
    """
    if spec.kind != "train" or spec.train is None:
        return None
    if spec.trained_shape is None:
        return None
    request = _scenario(
        spec, spec.trained_shape, hardware, plan.world_size, plan.global_batch_size, teacher
    ).request(plan)
    table = answers.build_table([request], hardware.calibration)
    [answer] = answers.answer_table(table, [request], hardware.calibration)
    document = {key: value for key, value in answer.items() if key not in ("id", "ok", "problems")}
    document |= {
        "tokens_per_s": answer["tokens_per_s_per_device"] * plan.world_size,
        "largest_bytes": {
            part: round(float(table.column(name).max()))
            for part, name in _LARGEST.items()
            if part != "reference" or spec.train.compares
        },
        **_rollouts(table, spec.train),
        **peak_shares(answer, hardware.mfu_peak_tflops(plan.precision, plan.world_size)),
        "device": hardware.entry.name,
        "cluster": {**request.cluster.to_dict(), "device": _device(request.entry)},
        "framework": {"name": request.framework.name, "optimizer": request.framework.optimizer},
        "calibration": hardware.calibration_name,
        "assumed": not hardware.known,
    }
    if hardware.notes:
        document["notes"] = [*document.get("notes", []), *hardware.notes]
    if unknown_teacher:
        document["notes"] = [*document.get("notes", []), _UNKNOWN_TEACHER]
    fits = bool(answer["fits"])
    return Prediction(document, fits, [] if fits else _advice(spec, request, hardware))


def peak_shares(rates: Mapping[str, Any], peak_tflops: float) -> dict[str, float]:
    """`{mfu, hfu, peak_tflops}` of a prediction, by one peak in TFLOP/s per device."""
    rate, mfu = rates.get("tflops_per_device"), rates.get("mfu")
    if not rate or not mfu:
        return {}
    share = float(rate) / peak_tflops
    return {
        "mfu": share,
        "hfu": float(rates.get("hfu") or mfu) / float(mfu) * share,
        "peak_tflops": peak_tflops,
    }


def _rollouts(table: Table, train: TrainBody) -> dict[str, Any]:
    """`rollouts` {generation_s, sync_s} of an iteration, as the run measures them.

    With `rollout_s`, the seconds of each step that rollouts and PPO's value model take.
    """
    if rollouts_of(train) is None:
        return {}
    generation = float(table.column("prefill_s")[0] + table.column("decode_s")[0])
    sync = float(table.column("weight_sync_s")[0])
    return {
        "rollouts": {"generation_s": generation, "sync_s": sync},
        "rollout_s": float(table.column("rollout_s")[0]),
    }


def _scenario(
    spec: RunSpec,
    shape: ModelSpec,
    hardware: TargetHardware,
    devices: int,
    batch: int,
    teacher: ModelSpec | None,
) -> Scenario:
    assert spec.train is not None
    tokens = float(spec.train.steps * batch * spec.train.seq_len)
    work = Workload(
        seq_len=spec.train.seq_len,
        global_batch_size=batch,
        tokens=tokens,
        trained_share=trained_share(spec) if hardware.entry.kind == "cpu" else 1.0,
    )
    return Scenario(
        shape,
        hardware.cluster(devices),
        work,
        _framework(spec),
        hardware.device(devices),
        spec.train,
        teacher,
    )


def _framework(spec: RunSpec) -> Framework:
    assert spec.train is not None
    optimizer = spec.train.optimizer
    states = _STATES.get(optimizer.name, optimizer.name)
    if optimizer.name == "sgd" and optimizer.momentum:
        states = "lion"  # one moment per parameter, as with momentum
    return replace(
        framework("orrery"),
        optimizer=states,
        **({} if spec.train.fused_kernels else _UNFUSED),
    )


def _device(entry: Device) -> str | dict[str, Any]:
    """The device's name if it equals its catalogue entry, else the full entry."""
    return entry.name if entry == DEVICES[entry.name] else entry.to_dict()


def _advice(spec: RunSpec, request: Request, hardware: TargetHardware) -> list[PlanChange]:
    """The nearest changes that fit and that the engine supports."""
    changes = advise(request, hardware.calibration)
    return [change for change in changes if _is_supported(spec, change.plan)][:_MAX_ADVICE]


def _is_supported(spec: RunSpec, plan: ParallelPlan) -> bool:
    """Whether the engine supports the plan in combination with the rest of the spec."""
    return not plan_engine_problems(plan) and not combination_problems(
        spec.model_copy(update={"plan": plan})
    )


def _field(change: PlanChange) -> str:
    name = next(iter(change.changes), "")
    return (
        f"plan.{name}"
        if name in ParallelPlan.model_fields
        else "train.seq_len"
        if name == "seq_len"
        else "plan"
    )
