"""What a benchmark run trains: its base plan as a training run, and the techniques it compares.

`variants` expands techniques to variants.
"""

from __future__ import annotations

import difflib

from workers.contracts.base import Problem, problem
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.train import BenchmarkBody, TrainBody

# technique → what is compared; the last two measure the devices, the others change the plan
TECHNIQUES: dict[str, str] = {
    "accumulation": "micro-batch sizes of the same global batch",
    "recompute": "recompute none, selective, full and auto",
    "compile": "blocks in eager mode, and with torch.compile",
    "fused_kernels": "fused kernels, and the same formulas in plain torch operations",
    "precision": "fp32, bf16, fp16 and fp8",
    "zero": "ZeRO 0 to 3",
    "prefetch": "layers prefetched under ZeRO 3",
    "offload": "states kept on the device, the host and a disk",
    "schedule": "pipeline schedules",
    "sequence_parallel": "sequence parallel on and off with tensor parallel",
    "axes": "all ranks along one axis: data, tensor, pipeline, context",
    "collectives": "collectives and sends between the ranks, by size",
    "products": "matrix products of one device, by size and precision",
}
DEVICE_TECHNIQUES = ("collectives", "products")


def technique_problems(body: BenchmarkBody) -> list[Problem]:
    """Unknown technique names."""
    problems = []
    for index, name in enumerate(body.techniques):
        field = f"benchmark.techniques.{index}"
        if name not in TECHNIQUES:
            near = difflib.get_close_matches(name, TECHNIQUES, n=1)
            message = f"{name!r} is not a technique"
            problems.append(
                problem(
                    field,
                    message,
                    f"Use {near[0]}." if near else f"Use one of {', '.join(TECHNIQUES)}.",
                )
            )
    return problems


def selected_techniques(body: BenchmarkBody) -> list[str]:
    """The requested techniques in the order of TECHNIQUES; all if the body names none."""
    return [name for name in TECHNIQUES if not body.techniques or name in body.techniques]


def steps_per_repeat(body: BenchmarkBody) -> int:
    """Steps of one repeat of a variant, including the warmup steps, which are not timed."""
    return body.warmup_steps + -(-body.steps // repeat_count(body))


def repeat_count(body: BenchmarkBody) -> int:
    """How often every variant is built and trained; at most the number of timed steps."""
    return min(body.repeats, body.steps)


def as_training(
    spec: RunSpec, plan: ParallelPlan | None = None, *, compiled: bool = False, fused: bool = True
) -> RunSpec:
    """One repeat as a training run with `plan`, or else the benchmark's own plan.

    A spec of another kind is returned unchanged.
    """
    body = spec.benchmark
    if body is None:
        return spec
    train = TrainBody(
        steps=steps_per_repeat(body),
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
