"""Exports a plan as Megatron-LM training arguments for `pretrain_gpt.py`, one per line.

Options as in Megatron-LM core 0.20.0 (`megatron/training/arguments.py`,
`core/transformer/transformer_config.py`); model arguments are in `megatron_model`. Does not set
data.
"""

from __future__ import annotations

from orchestrator.planner.interchange.export_job import (
    Exported,
    ExportJob,
    note_cpu,
    note_gathering,
    refuse,
    torchrun,
)
from orchestrator.planner.interchange.megatron_model import Args, model_args
from orchestrator.planner.interchange.text_formats import commented

ENGINE = "Megatron"
VERSION = "core 0.20.0"


def write(job: ExportJob) -> Exported:
    """Writes `megatron.args`. Raises Inexpressible for models and plans it cannot run."""
    args = [
        *model_args(job),
        *_batch(job),
        *_degrees(job),
        *(_pipeline(job) if job.plan.pp > 1 else []),
        *_sharding(job),
        *_precision(job),
        *_recompute(job),
        *_optimizer(job),
    ]
    job.note(
        f"Megatron-LM {VERSION}: set -f; {torchrun(job)} pretrain_gpt.py $(grep -v '^#' "
        "megatron.args) "
        "--data-path ... --tokenizer-type ..."
    )
    note_cpu(job, ENGINE)
    body = "\n".join(" ".join((flag, *values)) for flag, *values in args) + "\n"
    return Exported(commented(job.comments(), body), "megatron.args", tuple(job.notes))


def _batch(job: ExportJob) -> Args:
    plan = job.plan
    return [
        ("--seq-length", str(job.seq_len)),
        ("--micro-batch-size", str(plan.micro_batch_size)),
        ("--global-batch-size", str(plan.global_batch_size)),
        *([("--train-iters", str(job.steps))] if job.steps is not None else []),
    ]


def _degrees(job: ExportJob) -> Args:
    plan = job.plan
    args: Args = [
        ("--tensor-model-parallel-size", str(plan.tp)),
        ("--pipeline-model-parallel-size", str(plan.pp)),
        ("--context-parallel-size", str(plan.cp)),
    ]
    if plan.cp > 1 and job.seq_len % (2 * plan.cp):
        raise refuse(
            ENGINE,
            f"splits a sequence into 2 cp chunks; {job.seq_len} does not divide by {2 * plan.cp}",
            "Use another sequence length.",
        )
    if job.model.moe:
        # ep divides dp x cp, so experts have the same tensor parallelism as other layers
        args += [
            ("--expert-model-parallel-size", str(plan.ep)),
            ("--expert-tensor-parallel-size", str(plan.tp)),
        ]
        if plan.tp > 1 and not plan.sequence_parallel:
            raise refuse(
                ENGINE,
                "routes tokens under tensor parallelism only with sequence_parallel",
                "Use sequence_parallel true.",
            )
    if plan.sequence_parallel and plan.tp > 1:
        args.append(("--sequence-parallel",))
    if plan.tp * plan.cp > 1:
        job.note(
            "On devices before Blackwell set CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron "
            "requires with tp or cp"
            + (" (but not with its FSDP, written here)" if plan.zero >= 2 else "")
        )
    if plan.tp > job.cluster.devices_per_node:
        job.note(
            f"tp {plan.tp} spans nodes of {job.cluster.devices_per_node} devices: expect a slow "
            "network in every layer"
        )
    return args


def _pipeline(job: ExportJob) -> Args:
    plan, layers = job.plan, job.model.layers
    stages, virtual = plan.stages, plan.virtual_stages
    interleaved = plan.schedule in ("interleaved_1f1b", "zb1p")
    if interleaved and plan.accumulation % plan.pp:
        message = (
            f"interleaves micro-batches in full rounds of pp {plan.pp}, {plan.accumulation} is not "
            "divisible"
        )
        raise refuse(
            ENGINE,
            message,
            f"Use a multiple of {plan.pp * plan.micro_batch_size * plan.dp} as global batch.",
        )
    if plan.schedule == "zb1p":
        job.note(
            "Megatron has no zb1p: written as interleaved 1F1B, with its larger bubble; "
            "torchtitan runs zb1p"
        )
    elif plan.schedule in ("zbv", "dualpipev"):
        job.note(
            f"Megatron has no {plan.schedule}: written as 1F1B with the same micro-batches in "
            f"flight and a larger bubble; torchtitan runs {plan.schedule}"
        )
    elif plan.schedule == "pipedream":
        job.note(
            "Megatron has no pipedream: written as 1F1B, which flushes each step and has no stale "
            "weights; Orrery's own engine runs pipedream"
        )
    elif plan.schedule in ("gpipe", "naive"):
        job.note(f"Megatron has no {plan.schedule}: written as 1F1B, so bubble and memory differ")
    if not interleaved and virtual > 1:
        stages, virtual = plan.pp, 1
    counts = plan.layers_of_stages(layers)
    if len(counts) != stages:  # merge the two stages of a device in a V-shaped pipeline
        counts = [counts[i] + counts[-1 - i] for i in range(stages)]
    if len(set(counts)) > 1:
        return [("--pipeline-model-parallel-layout", _layout(counts))]
    return [("--num-layers-per-virtual-pipeline-stage", str(counts[0]))] if virtual > 1 else []


def _layout(counts: list[int]) -> str:
    """`Et*4|t*3|t*3L`: embedding, transformer layers and loss of each stage."""
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(parts)


def _sharding(job: ExportJob) -> Args:
    plan = job.plan
    args: Args = []
    if plan.zero:
        args.append(("--use-distributed-optimizer",))
    if plan.zero >= 2:
        args += [
            ("--use-megatron-fsdp",),
            (
                "--data-parallel-sharding-strategy",
                "optim_grads" if plan.zero == 2 else "optim_grads_params",
            ),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
        if plan.pp > 1:
            job.note(
                "Megatron documents its FSDP with tp and ep, not with a pipeline: test a few steps "
                "first"
            )
    if plan.dp * plan.cp > 1:
        args.append(("--overlap-grad-reduce",))
        if plan.zero:
            args.append(("--overlap-param-gather",))
    if plan.zero and plan.dp_replicate and plan.dp_replicate > 1:
        args.append(("--num-distributed-optimizer-instances", str(plan.dp_replicate)))
    if plan.offload == "optimizer":
        if not plan.zero:
            raise refuse(
                ENGINE,
                "offloads its distributed optimizer only; the plan has zero 0",
                "Use zero 1.",
            )
        args += [("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",)]
    elif plan.offload != "none":
        raise refuse(
            ENGINE,
            f"offloads the optimizer only; the plan has offload {plan.offload}",
            "Use offload optimizer, or deepspeed.",
        )
    note_gathering(job, "Megatron")
    return args


def _precision(job: ExportJob) -> Args:
    plan = job.plan
    args: Args = []
    if plan.precision in ("bf16", "fp8"):
        args.append(("--bf16",))
        if plan.precision == "fp8":
            args += [("--fp8-format", "hybrid"), ("--fp8-recipe", "delayed")]
        if plan.grad_dtype == "bf16" or plan.reduce_dtype == "bf16":
            args.append(("--grad-reduce-in-bf16",))
        elif plan.grad_dtype is None:
            job.note(
                "Megatron stores and reduces bf16 gradients in fp32, 4 bytes each; "
                "--grad-reduce-in-bf16 halves that"
            )
    elif plan.precision == "fp16":
        args.append(("--fp16",))
        scale = plan.loss_scale
        if scale:
            args += [
                ("--initial-loss-scale", f"{scale.initial:.15g}"),
                ("--loss-scale-window", str(scale.growth_interval)),
            ]
            if (scale.growth, scale.backoff) != (2.0, 0.5):
                job.note("Megatron always doubles and halves the loss scale")
    if plan.params_dtype == "bf16" and plan.precision != "fp32":
        job.note("Megatron uses fp32 master weights, params_dtype bf16 is omitted")
    return args


def _recompute(job: ExportJob) -> Args:
    recompute = job.plan.recompute
    if recompute == "selective":
        job.note(
            "Megatron's selective recompute repeats core attention, as fused attention kernels "
            "always do"
        )
        return [("--recompute-granularity", "selective")]
    if recompute == "auto":
        job.note(
            "Megatron has no recompute budget: auto is written as full, which takes less memory "
            "and more time"
        )
    if recompute in ("full", "auto"):
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    return []


def _optimizer(job: ExportJob) -> Args:
    if job.lr is None:
        job.note("Set --lr and its schedule; the optimizer is Adam")
        return [("--optimizer", "adam")]
    return [("--optimizer", "adam"), ("--lr", f"{job.lr:.15g}")]
