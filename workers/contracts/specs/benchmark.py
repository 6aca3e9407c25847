"""What a benchmark run trains: its base plan as a training run, and the techniques that are turned
on and off.

Knows names and turns; which variants a technique means is `variants`'.
"""

from __future__ import annotations

import difflib

from workers.contracts.base import Problem, problem
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.run_bodies import BenchmarkBody, TrainBody

# technique → what is compared; the first ones change the plan, the last two measure the devices
# themselves
TECHNIQUES: dict[str, str] = {
    "accumulation": "micro-batch sizes of the same global batch",
    "recompute": "recompute none, selective, full and auto",
    "compile": "blocks run as they are, and by torch.compile",
    "fused_kernels": "kernels as chosen, and formulas step by step in plain torch",
    "precision": "fp32, bf16, fp16 and fp8",
    "zero": "ZeRO 0 to 3",
    "prefetch": "layers gathered ahead under ZeRO 3",
    "offload": "states kept on the device, the host and a disk",
    "schedule": "pipeline schedules",
    "sequence_parallel": "sequence parallel beside tensor parallel",
    "axes": "all ranks along one axis: data, tensor, pipeline, context",
    "collectives": "collectives and sends between the ranks, by size",
    "products": "matrix products of one device, by size and precision",
}
OF_DEVICES = ("collectives", "products")


def technique_problems(body: BenchmarkBody) -> list[Problem]:
    """Names that are none."""
    found = []
    for place, name in enumerate(body.techniques):
        field = f"benchmark.techniques.{place}"
        if name not in TECHNIQUES:
            near = difflib.get_close_matches(name, TECHNIQUES, n=1)
            message = f"{name!r} is no technique to compare"
            found.append(problem(field, message, near[0] if near else ", ".join(TECHNIQUES)))
    return found


def techniques_of(body: BenchmarkBody) -> list[str]:
    """Those asked for, each once and in the order of TECHNIQUES; all where none is named."""
    return [name for name in TECHNIQUES if not body.techniques or name in body.techniques]


def turn_steps(body: BenchmarkBody) -> int:
    """Steps of one turn of a variant, those that are not timed included."""
    return body.warmup_steps + -(-body.steps // turns(body))


def turns(body: BenchmarkBody) -> int:
    """How often every variant is built and trained; never more turns than timed steps."""
    return min(body.repeats, body.steps)


def as_training(
    spec: RunSpec, plan: ParallelPlan | None = None, *, compiled: bool = False, fused: bool = True
) -> RunSpec:
    """One turn as a training run; its plan is `plan`, or the benchmark's own.

    A spec of another kind as it is.
    """
    body = spec.benchmark
    if body is None:
        return spec
    train = TrainBody(
        steps=turn_steps(body),
        seq_len=body.seq_len,
        seed=body.seed,
        optimizer=body.optimizer,
        clip_norm=body.clip_norm,
        compile=compiled,
        fused_kernels=fused,
    )
    changes = {"kind": "train", "train": train, "benchmark": None} | (
        {"plan": plan} if plan is not None else {}
    )
    return spec.model_copy(update=changes)
