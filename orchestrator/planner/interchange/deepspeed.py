"""Exports a plan as DeepSpeed's JSON configuration.

Options as in DeepSpeed 0.19.6 (`deepspeed/runtime/config.py`, `runtime/zero/config.py`,
`runtime/precision_config.py`, docs `config-json`). The file has no model, which DeepSpeed takes in
Python. `train_batch_size` is micro-batch x accumulation x dp.
"""

from __future__ import annotations

import json
import math
from typing import Any

from orchestrator.planner.interchange.export_job import Exported, ExportJob, refuse
from workers.contracts.catalog.counts import parameter_count

ENGINE = "DeepSpeed"
VERSION = "0.19.6"

# a placeholder; DeepSpeed needs a folder on a fast local disk
NVME_PATH = "/local_nvme"


def write(job: ExportJob) -> Exported:
    """Writes `ds_config.json`. Raises Inexpressible for plans that DeepSpeed cannot run."""
    plan = job.plan
    values: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": _zero(job),
        **_precision(job),
        **_mesh(job),
        **_recompute(job),
    }
    if job.lr is not None:
        values["optimizer"] = {"type": "AdamW", "params": {"lr": job.lr}}
    if plan.offload == "nvme":
        values["aio"] = {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
        }
    if job.steps is not None:
        job.note(f"Set the number of steps, {job.steps}, in your training loop")
    nodes = f"--num_nodes {job.cluster.nodes} --num_gpus {job.cluster.devices_per_node}"
    job.note(f"DeepSpeed {VERSION}: deepspeed {nodes} train.py --deepspeed_config ds_config.json")
    job.note(
        f"Set the model ({job.model.name}) and sequences of {job.seq_len} tokens in your program"
    )
    return Exported(json.dumps(values, indent=2) + "\n", "ds_config.json", tuple(job.notes))


def _zero(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    values: dict[str, Any] = {"stage": plan.zero, "overlap_comm": plan.zero > 0}
    if plan.pp > 1 and plan.zero > 1:
        raise refuse(
            ENGINE,
            f"supports pipelines with ZeRO 0 or 1 only; the plan has zero {plan.zero}",
            "Use zero 1, or megatron or torchtitan.",
        )
    if plan.offload != "none":
        _offload(job, values)
    if plan.zero == 3:
        if plan.max_live_params is not None:
            values["stage3_max_live_parameters"] = plan.max_live_params
        if plan.param_persistence_threshold is not None:
            values["stage3_param_persistence_threshold"] = plan.param_persistence_threshold
        if plan.prefetch_layers is not None:
            # in elements of the layers that a device gathers
            values["stage3_prefetch_bucket_size"] = plan.prefetch_layers * _layer_elements(job)
        values["stage3_gather_16bit_weights_on_model_save"] = True
    elif plan.prefetch_layers is not None or plan.max_live_params is not None:
        job.note("prefetch_layers and max_live_params require ZeRO-3 in DeepSpeed and are omitted")
    if plan.dp_replicate and plan.dp_replicate > 1 and plan.zero:
        if plan.zero == 3:
            values["mics_shard_size"] = plan.dp_shard
            job.note("dp_replicate uses MiCS: construct the model under deepspeed.zero.MiCS_Init")
        else:
            job.note(
                f"DeepSpeed shards ZeRO-{plan.zero} over all dp ranks, dp_replicate "
                f"{plan.dp_replicate} is omitted"
            )
    return values


def _offload(job: ExportJob, values: dict[str, Any]) -> None:
    plan = job.plan
    if plan.zero == 0:
        raise refuse(
            ENGINE,
            f"offloads under ZeRO only; the plan has zero 0 and offload {plan.offload}",
            "Use zero 1 to 3.",
        )
    device: dict[str, Any] = {
        "device": "nvme" if plan.offload == "nvme" else "cpu",
        "pin_memory": True,
    }
    if plan.offload == "nvme":
        if plan.zero < 3:
            raise refuse(
                ENGINE,
                f"offloads to NVMe under ZeRO-3 only; the plan has zero {plan.zero}",
                "Use zero 3, or offload optimizer.",
            )
        device["nvme_path"] = NVME_PATH
        job.note(f"Set nvme_path (here {NVME_PATH}) to a folder on a fast local disk")
    values["offload_optimizer"] = dict(device)
    if plan.offload == "all":
        if plan.zero < 3:
            raise refuse(
                ENGINE,
                f"offloads parameters under ZeRO-3 only; the plan has zero {plan.zero}",
                "Use zero 3, or offload optimizer.",
            )
        values["offload_param"] = dict(device)
    elif plan.offload == "nvme":
        values["offload_param"] = dict(device)


def _precision(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    if plan.params_dtype is not None and plan.precision != "fp32" and plan.params_dtype != "fp32":
        job.note("DeepSpeed uses fp32 master weights, params_dtype is omitted")
    values: dict[str, Any] = {}
    if plan.precision in ("bf16", "fp8"):
        values["bf16"] = {"enabled": True}
        if plan.precision == "fp8":
            job.note(
                "DeepSpeed has no fp8: written as bf16; use Transformer Engine's fp8 layers "
                "in your model"
            )
    elif plan.precision == "fp16":
        values["fp16"] = {"enabled": True, **_loss_scale(job)}
    if plan.grad_dtype is not None:
        values["data_types"] = {"grad_accum_dtype": plan.grad_dtype}
    if plan.reduce_dtype is not None:
        values["communication_data_type"] = plan.reduce_dtype
    return values


def _loss_scale(job: ExportJob) -> dict[str, Any]:
    scale = job.plan.loss_scale
    if scale is None:
        return {"loss_scale": 0}
    power = round(math.log2(scale.initial))
    if 2.0**power != scale.initial:
        job.note(f"DeepSpeed starts at a power of two: 2^{power} instead of {scale.initial:g}")
    if (scale.growth, scale.backoff) != (2.0, 0.5):
        job.note("DeepSpeed always doubles and halves the loss scale")
    return {
        "loss_scale": 0,
        "initial_scale_power": power,
        "loss_scale_window": scale.growth_interval,
    }


def _mesh(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    values: dict[str, Any] = {}
    if plan.tp > 1 and plan.pp > 1:
        job.note(
            "A PipelineModule's layers implement tp: pass "
            f"PipeModelDataParallelTopology(num_pp={plan.pp}, "
            f"num_mp={plan.tp}, num_dp={plan.dp})"
        )
    elif plan.tp > 1:
        if plan.ep > 1:
            raise refuse(
                ENGINE,
                "does not combine AutoTP with expert parallelism",
                "Use tp 1 or ep 1, or megatron or torchtitan.",
            )
        values["tensor_parallel"] = {"autotp_size": plan.tp}
        job.note(
            "Tensor parallel uses AutoTP: it splits Hugging Face models automatically, others by a "
            "partition_config"
        )
        if plan.sequence_parallel:
            job.note(
                "AutoTP does not shard the sequence between blocks: activations take more memory "
                "than planned"
            )
    if plan.cp > 1:
        if plan.tp > 1 or plan.pp > 1:
            raise refuse(
                ENGINE,
                "does not combine its sequence parallelism with tp or pp",
                "Use tp 1 and pp 1, or megatron.",
            )
        heads = job.model.heads
        if heads % plan.cp:
            raise refuse(
                ENGINE,
                f"shards heads over cp (Ulysses); {heads} heads do not divide by cp {plan.cp}",
                "Use megatron or torchtitan.",
            )
        values |= {"sequence_parallel_size": plan.cp, "data_parallel_size": plan.dp}
        job.note(
            "Context parallel uses Ulysses (all-to-all over heads), not a ring: its traffic "
            "differs from the plan"
        )
        if job.model.kv_heads % plan.cp and job.model.attention == "softmax":
            job.note(f"{job.model.kv_heads} key-value heads are repeated to reach cp {plan.cp}")
    if plan.ep > 1:
        if plan.dp % plan.ep:
            raise refuse(
                ENGINE,
                f"distributes experts over dp ranks; ep {plan.ep} does not divide dp {plan.dp}",
                "Use another ep, or megatron.",
            )
        values["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep}
        job.note(
            "Expert parallel uses AutoEP: set preset_model or the patterns of your model's experts"
        )
    if plan.pp > 1:
        values["pipeline"] = {"stages": plan.pp, "partition": "uniform"}
        _pipeline(job)
    return values


def _pipeline(job: ExportJob) -> None:
    plan = job.plan
    job.note(
        f"Build the model as PipelineModule(layers, num_stages={plan.pp}, "
        "partition_method='uniform'); micro-batches "
        f"of a step are the {plan.accumulation} accumulation steps"
    )
    if plan.schedule != "1f1b":
        other = (
            "Orrery's own engine runs pipedream"
            if plan.schedule == "pipedream"
            else "torchtitan may run it"
        )
        job.note(
            f"DeepSpeed's pipeline is 1F1B, not {plan.schedule}: bubble and memory differ; {other}"
        )
    if plan.stage_layers is not None:
        job.note(
            f"partition_method has no list of layers per stage, {plan.stage_layers} is omitted"
        )


def _recompute(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    if plan.recompute == "none":
        return {}
    if plan.recompute != "full":
        job.note(
            f"DeepSpeed has no recompute {plan.recompute}: written as full, which takes less "
            "memory and more time"
        )
    job.note(
        "For recompute call deepspeed.checkpointing (or torch's) in your model, once per block"
    )
    return {
        "activation_checkpointing": {
            "partition_activations": plan.tp > 1,
            "number_checkpoints": job.model.layers,
        }
    }


def _layer_elements(job: ExportJob) -> int:
    count = parameter_count(job.model)
    moe = job.model.moe
    return (
        count.layer(moe=moe is not None, experts=moe.experts // job.plan.ep if moe else 0)
        // job.plan.tp
    )
