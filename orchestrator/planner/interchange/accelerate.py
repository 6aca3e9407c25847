"""Exports a plan as Hugging Face accelerate YAML: FSDP2 with a mesh, DeepSpeed, or data parallel.

Options as in accelerate 1.15.0 (`commands/config/config_args.py`, `parallelism_config.py`,
`utils/launch.py`). The user's program sets the model, the batch and the accumulation; notes say
how.
"""

from __future__ import annotations

from typing import Any

from orchestrator.planner.interchange.deepspeed import NVME_PATH
from orchestrator.planner.interchange.export_job import (
    Exported,
    ExportJob,
    note_gathering,
    refuse,
    torchrun,
)
from orchestrator.planner.interchange.text_formats import commented, yaml

ENGINE = "accelerate"
VERSION = "1.15.0"


def write(job: ExportJob) -> Exported:
    """Writes `accelerate.yaml`. Raises Inexpressible for plans that accelerate cannot run."""
    plan, cluster = job.plan, job.cluster
    if plan.pp > 1:
        raise refuse(
            ENGINE,
            f"does not support pipeline parallelism; the plan has pp {plan.pp}",
            "Use pp 1, or torchtitan, megatron or deepspeed.",
        )
    if plan.ep > 1:
        raise refuse(
            ENGINE,
            f"does not support expert parallelism; the plan has ep {plan.ep}",
            "Use ep 1, or torchtitan or megatron.",
        )
    kind, body = _engine(job)
    on_cpu = cluster.entry.kind == "cpu"
    if on_cpu and kind in ("FSDP", "DEEPSPEED"):
        # the launcher starts the ranks, but each one trains a full model alone
        raise refuse(
            ENGINE,
            "shards on accelerators only; the cluster's devices are CPUs",
            "Use zero 0, or Orrery's own engine.",
        )
    if on_cpu and kind == "MULTI_GPU":
        kind = "MULTI_CPU"
        precision = "no" if plan.precision == "fp32" else plan.precision
        job.note(
            "On CPUs accelerate launch starts only one rank. Start all with "
            "ACCELERATE_USE_CPU=true "
            f"ACCELERATE_MIXED_PRECISION={precision} {torchrun(job)} train.py"
        )
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": cluster.nodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
        "rdzv_backend": "static" if cluster.nodes == 1 else "c10d",
        "same_network": True,
        "main_training_function": "main",
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "use_cpu": on_cpu,
        "debug": False,
        **body,
    }
    if cluster.nodes > 1:
        values |= {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
        job.note(
            "On each machine set machine_rank, and main_process_ip to the first machine's address"
        )
    if plan.precision == "fp8":
        values["fp8_config"] = {"backend": "TE", "fp8_format": "HYBRID"}
        job.note("fp8 requires Transformer Engine")
    _note_program_settings(job)
    job.note(f"accelerate {VERSION}: accelerate launch --config_file accelerate.yaml train.py")
    return Exported(commented(job.comments(), yaml(values)), "accelerate.yaml", tuple(job.notes))


def _engine(job: ExportJob) -> tuple[str, dict[str, Any]]:
    """`distributed_type` and its section: DeepSpeed for ZeRO-1 and partial offload, else FSDP2."""
    plan = job.plan
    mesh = plan.tp * plan.cp > 1
    partial = plan.offload in ("optimizer", "nvme") or (plan.offload == "all" and plan.zero < 3)
    if partial and mesh:
        raise refuse(
            ENGINE,
            f"offloads {plan.offload} through DeepSpeed only, which does not support a mesh of tp "
            "and cp",
            "Use offload none, or deepspeed.",
        )
    if not mesh and (partial or (plan.zero == 1 and plan.dp > 1)):
        return "DEEPSPEED", {"deepspeed_config": _deepspeed(job)}
    if plan.world_size == 1:
        return "NO", {}
    if plan.zero == 0 and not mesh:
        return "MULTI_GPU", {}
    return "FSDP", _fsdp(job)


def _fsdp(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    replicate, shard = (plan.dp_replicate or 1, plan.dp_shard) if plan.zero else (plan.dp, 1)
    if shard * plan.cp == 1:
        raise refuse(
            ENGINE,
            f"combines tp with sharding only; the plan has tp {plan.tp}, dp {plan.dp} and "
            f"zero {plan.zero}",
            "Use zero 3 with dp at least 2, or torchtitan, megatron or deepspeed.",
        )
    if shard == 1 and replicate > 1:
        raise refuse(
            ENGINE,
            f"does not combine tp or cp with replicated weights over dp {plan.dp}",
            "Use zero 3, or torchtitan or megatron.",
        )
    if plan.zero == 0:
        job.note(
            f"accelerate shards weights over the cp ranks, here {plan.cp}: less memory than with "
            "zero 0"
        )
    if plan.zero == 1:
        job.note(
            "accelerate has no ZeRO-1 with tp or cp: written as ZeRO-2, which also shards gradients"
        )
    fsdp: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.zero in (0, 3),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": plan.offload == "all",
        "fsdp_activation_checkpointing": plan.recompute in ("full", "auto"),
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if plan.recompute in ("selective", "auto"):
        other = (
            "as full" if plan.recompute == "auto" else "without, so activations take more memory"
        )
        job.note(
            f"accelerate recomputes full blocks or nothing: recompute {plan.recompute} is written "
            f"{other}"
        )
    sections: dict[str, Any] = {"fsdp_config": fsdp}
    if plan.tp * plan.cp * replicate > 1:
        sections["parallelism_config"] = _mesh(job, replicate, shard)
    note_gathering(job, "accelerate; FSDP2 prefetches one block by itself")
    return sections


def _mesh(job: ExportJob, replicate: int, shard: int) -> dict[str, Any]:
    plan = job.plan
    mesh: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": replicate,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": plan.tp,
        "parallelism_config_cp_size": plan.cp,
    }
    if plan.cp > 1:
        mesh["parallelism_config_cp_comm_strategy"] = "alltoall"
        job.note("Wrap each step in accelerator.maybe_context_parallel with the buffers to split")
    if plan.tp > 1:
        job.note(
            "Load the model with from_pretrained(..., device_mesh=accelerator.torch_device_mesh, "
            "tp_plan='auto')"
        )
        if plan.sequence_parallel:
            job.note(
                "A model's tp_plan may not shard the sequence between blocks: activations may take "
                "more memory"
            )
    return mesh


def _deepspeed(job: ExportJob) -> dict[str, Any]:
    plan = job.plan
    if plan.zero == 0:
        raise refuse(
            ENGINE,
            f"offloads under ZeRO only; the plan has zero 0 and offload {plan.offload}",
            "Use zero 1 to 3.",
        )
    if plan.zero < 3 and plan.offload in ("all", "nvme"):
        raise refuse(
            ENGINE,
            f"offloads parameters under ZeRO-3 only; the plan has zero {plan.zero}",
            "Use zero 3, or offload optimizer.",
        )
    values: dict[str, Any] = {
        "zero_stage": plan.zero,
        "gradient_accumulation_steps": plan.accumulation,
    }
    device = {"none": "none", "nvme": "nvme"}.get(plan.offload, "cpu")
    values["offload_optimizer_device"] = device
    values["offload_param_device"] = device if plan.offload in ("all", "nvme") else "none"
    if plan.offload == "nvme":
        values |= {"offload_optimizer_nvme_path": NVME_PATH, "offload_param_nvme_path": NVME_PATH}
        job.note(f"Set the nvme_path entries (here {NVME_PATH}) to a folder on a fast local disk")
    values["zero3_init_flag"] = plan.zero == 3
    if plan.zero == 3:
        values["zero3_save_16bit_model"] = True
    if plan.dp_replicate and plan.dp_replicate > 1:
        job.note(
            f"DeepSpeed shards ZeRO-{plan.zero} over all dp ranks, dp_replicate "
            f"{plan.dp_replicate} is omitted"
        )
    if plan.recompute != "none":
        job.note("For recompute call model.gradient_checkpointing_enable()")
    return values


def _note_program_settings(job: ExportJob) -> None:
    plan = job.plan
    if plan.accumulation > 1:
        job.note(
            f"Use Accelerator(gradient_accumulation_steps={plan.accumulation}) and "
            "accelerator.accumulate(model)"
        )
    job.note(
        f"Give each process batches of {plan.micro_batch_size} sequences of {job.seq_len} tokens, "
        "global batch "
        f"{plan.global_batch_size}; the model is {job.model.name}"
    )
    if plan.zero == 0 and plan.recompute != "none" and plan.tp * plan.cp == 1:
        job.note("For recompute call model.gradient_checkpointing_enable()")
    if plan.grad_dtype or plan.reduce_dtype or plan.params_dtype:
        job.note(
            "accelerate's file has no dtype of gradients or weights: mixed precision uses fp32 "
            "weights"
        )
    if plan.precision == "fp16" and plan.loss_scale:
        scale = plan.loss_scale
        job.note(
            f"Pass GradScalerKwargs(init_scale={scale.initial:g}, "
            f"growth_interval={scale.growth_interval}, "
            f"growth_factor={scale.growth:g}, backoff_factor={scale.backoff:g})"
        )
    if job.steps is not None:
        job.note(f"Set the number of steps, {job.steps}, in your training loop")
    if job.lr is not None:
        job.note(f"Set the learning rate, {job.lr:g}, in your optimizer")
