"""Exports a plan as torchtitan's TOML job configuration.

Options as in torchtitan v0.2.2 (`torchtitan/config/job_config.py`,
`distributed/parallel_dims.py`), the last version that reads TOML; later versions accept the same
options as `--section.option`. The model is a torchtitan model and flavor (`torchtitan_models`).
Does not set data.
"""

from __future__ import annotations

from typing import Any

from orchestrator.planner.interchange.export_job import (
    Exported,
    ExportJob,
    note_cpu,
    note_gathering,
    refuse,
    torchrun,
)
from orchestrator.planner.interchange.text_formats import commented, toml
from orchestrator.planner.interchange.torchtitan_models import TitanModel, titan_model

ENGINE = "torchtitan"
VERSION = "0.2.2"

# names of torch.distributed.pipelining
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def write(job: ExportJob) -> Exported:
    """Writes `torchtitan.toml`. Raises Inexpressible for models and plans it cannot run."""
    titan = titan_model(job)
    tables: dict[str, dict[str, Any]] = {
        "job": {"description": job.headline},
        "model": _model(job, titan),
        "optimizer": {"name": "AdamW", **({"lr": job.lr} if job.lr is not None else {})},
        "training": _training(job),
        "parallelism": _parallelism(job, titan),
        "activation_checkpoint": _recompute(job),
    }
    if tables["activation_checkpoint"]["mode"] == "memory_budget":
        tables["compile"] = {"enable": True, "components": ["model"]}
    if job.plan.precision == "fp8":
        tables["compile"] = {"enable": True, "components": ["model", "loss"]}
        recipe = "tensorwise" if job.plan.fp8_recipe == "tensorwise" else "rowwise"
        tables["quantize.linear.float8"] = {"recipe_name": recipe, "filter_fqns": ["output"]}
        job.note(
            f"fp8 is torchao's {recipe} float8 on every linear layer except the output head; it "
            "requires compilation"
        )
    job.note(
        f"torchtitan {VERSION}: {torchrun(job)} -m torchtitan.train --job.config_file "
        "torchtitan.toml; versions without TOML accept the same options as --section.option"
    )
    note_cpu(job, ENGINE)
    job.note(
        "Set model.hf_assets_path to a folder with the tokenizer, and training.dataset to your data"
    )
    return Exported(commented(job.comments(), toml(tables)), "torchtitan.toml", tuple(job.notes))


def _model(job: ExportJob, titan: TitanModel) -> dict[str, Any]:
    if titan.registration:
        job.note(
            f"torchtitan has no flavor of this shape: register {titan.flavor!r} in "
            f"torchtitan/models/{titan.name}/"
            f"__init__.py as {titan.registration}"
        )
    values: dict[str, Any] = {"name": titan.name, "flavor": titan.flavor}
    if job.plan.precision == "fp8":
        values["converters"] = ["quantize.linear.float8"]
    return values


def _training(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    if plan.precision == "fp16":
        raise refuse(
            ENGINE, "has no fp16 (no loss scaling)", "Use bf16, or deepspeed or megatron for fp16."
        )
    wide = plan.precision == "fp32"
    sharded = plan.dp_shard * plan.cp > 1 if plan.zero else plan.cp > 1
    if not wide and not sharded and plan.tp * plan.pp > 1:
        raise refuse(
            ENGINE,
            f"supports mixed precision only with sharded weights or dp alone; tp {plan.tp} x pp "
            f"{plan.pp} would train in fp32",
            "Use zero 3 with dp at least 2, or megatron.",
        )
    values: dict[str, Any] = {
        # a pipeline takes all sequences of a rank's step at once, else one micro-batch at a time
        "local_batch_size": plan.micro_batch_size * (plan.accumulation if plan.pp > 1 else 1),
        "global_batch_size": plan.global_batch_size,
        "seq_len": job.seq_len,
        "mixed_precision_param": "float32" if wide else "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    if plan.params_dtype == "bf16" and not wide:
        values["dtype"] = "bfloat16"
        job.note("training.dtype bfloat16 also stores optimizer states in bf16")
    if "fp16" in (plan.params_dtype, plan.grad_dtype, plan.reduce_dtype) or "bf16" in (
        plan.grad_dtype,
        plan.reduce_dtype,
    ):
        job.note("torchtitan always reduces gradients in fp32")
    if plan.offload in ("optimizer", "all"):
        if plan.zero == 0:
            raise refuse(
                ENGINE,
                "offloads sharded states only",
                "Use zero 3, or megatron for the optimizer alone.",
            )
        values["enable_cpu_offload"] = True
        if plan.offload == "optimizer":
            job.note(
                "torchtitan also offloads parameters and gradients: less device memory, a slower "
                "step"
            )
    elif plan.offload == "nvme":
        raise refuse(ENGINE, "does not offload to NVMe", "Use deepspeed.")
    if job.steps is not None:
        values["steps"] = job.steps
    if job.model.dropout:
        job.note(f"torchtitan has no dropout, {job.model.dropout:g} is omitted")
    return values


def _parallelism(job: ExportJob, titan: TitanModel) -> dict[str, Any]:
    plan = job.plan
    replicate, shard = (plan.dp_replicate or 1, plan.dp_shard) if plan.zero else (plan.dp, 1)
    if shard * plan.cp == 1 and replicate > 1 and plan.tp * plan.pp > 1:
        raise refuse(
            ENGINE,
            "replicates weights over dp only if tp, pp and cp are 1",
            "Use zero 3 or 2, or megatron or deepspeed.",
        )
    if plan.ep > 1 and (shard * plan.cp) % plan.ep:
        raise refuse(
            ENGINE,
            f"shards experts over sharded ranks; ep {plan.ep} does not divide dp_shard {shard} "
            f"x cp {plan.cp}",
            "Use zero 3 with a dp_replicate that leaves them together, or megatron.",
        )
    if job.seq_len % (plan.tp * (2 * plan.cp if plan.cp > 1 else 1)):
        raise refuse(
            ENGINE,
            f"requires a sequence length divisible by tp x 2 cp; {job.seq_len} is not divisible",
            "Use another sequence length.",
        )
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.zero:
        values["fsdp_reshard_after_forward"] = "always" if plan.zero == 3 else "never"
    if plan.zero == 1 and shard > 1:
        job.note(
            "torchtitan has no ZeRO-1: written as ZeRO-2, which shards gradients too (less "
            "memory, same traffic)"
        )
    if plan.zero == 0 and plan.cp > 1:
        job.note(
            f"torchtitan always shards weights over the cp ranks, here {plan.cp}: less memory "
            "than with zero 0"
        )
    if plan.ep > 1:
        # 1 would use the ranks of tp for expert parallelism too
        values["expert_tensor_parallel_degree"] = plan.tp
    if plan.tp > 1 and not plan.sequence_parallel:
        job.note(
            "torchtitan's tensor parallel always shards the sequence between blocks: less memory, "
            "same traffic"
        )
    if plan.tp > job.cluster.devices_per_node:
        job.note(
            f"tp {plan.tp} spans nodes of {job.cluster.devices_per_node} devices: expect a slow "
            "network in every layer"
        )
    note_gathering(job, "torchtitan; FSDP2 prefetches one block by itself")
    return values | (_pipeline(job, titan) if plan.pp > 1 else {})


def _pipeline(job: ExportJob, titan: TitanModel) -> dict[str, Any]:
    plan = job.plan
    if not titan.pipelines:
        raise refuse(
            ENGINE,
            f"{VERSION} has no pipeline for its model {titan.name}",
            "Use pp 1, or megatron.",
        )
    schedule = _SCHEDULES.get(plan.schedule)
    if schedule is None:
        schedule = _SCHEDULES["1f1b"]
        job.note(
            (
                f"torchtitan has no schedule {plan.schedule}: written as 1F1B, so bubble and "
                "memory differ"
            )
            + (
                " and weights are not stale; Orrery's own engine runs pipedream"
                if plan.schedule == "pipedream"
                else ""
            )
        )
    overlap: dict[str, Any] = {}
    if plan.schedule == "dualpipev" and plan.ep > 1 and plan.recompute != "none":
        overlap["pipeline_parallel_expert_parallel_overlap"] = False
        job.note(
            "torchtitan overlaps expert traffic in DualPipeV only without recompute: written "
            "without that overlap"
        )
    return overlap | {
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatch_size": plan.micro_batch_size,
        "module_fqns_per_model_part": _parts(plan.layers_of_stages(job.model.layers)),
    }


def _parts(layers: list[int]) -> list[list[str]]:
    """The modules of each stage; by default torchtitan counts embedding and head as layers."""
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    if plan.recompute == "auto":
        job.note(
            "recompute auto is torchtitan's memory_budget, a share (0 full recompute, 1 none), "
            "not bytes: tune it"
        )
        return {"mode": "memory_budget", "memory_budget": 0.5}
    if plan.recompute == "selective":
        job.note(
            "Selective recompute is torchtitan's per-operation mode: it saves attention and every "
            "second matrix product"
        )
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": plan.recompute}
