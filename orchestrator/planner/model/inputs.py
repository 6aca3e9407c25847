"""Input columns of all terms, from a model, a plan, a cluster and a framework.

The only list of column names. Does not predict anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.planner.model.columns.codes import OFFLOAD, PRECISION, RECOMPUTE, SCHEDULE
from orchestrator.planner.model.columns.model_columns import model_columns
from orchestrator.planner.model.columns.stage_columns import stage_columns
from orchestrator.planner.model.finetuning.rollout_columns import rollout_columns
from orchestrator.planner.model.finetuning.saved_columns import saved_columns
from orchestrator.planner.model.finetuning.second_module import second_columns
from orchestrator.planner.model.finetuning.trained_columns import flops_columns, training_columns
from orchestrator.planner.model.frameworks import Framework
from orchestrator.planner.model.priors import best_peer_mfu
from orchestrator.planner.model.terms import Column, Table, declare_inputs
from workers.contracts.catalog.devices import Device
from workers.contracts.catalog.units import GIB
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import TrainBody

declare_inputs(
    "",
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "max_seq_len",
    "gated",
    "norm_biased",
    "layernorm",
    "learned_positions",
    "tied",
    "qk_norm",
    "window",
    "dropout",
    "is_mla",
    "is_mfa",
    "q_lora",
    "kv_lora",
    "qk_nope",
    "qk_rope",
    "v_head_dim",
    "mfa_rank",
    "experts",
    "top_k",
    "expert_ffn",
    "shared_ffn",
    "moe_layers",
    "dense_layers",
    "capacity",
    "capacity_limit",
    "attention_width",
    "first_dense",
    "moe_every",
    "rope",
    "biased",
    "qkv_biased",
    "relu",
    "softcapped",
    "scalar_head",
)
declare_inputs(
    "parameters",
    "model",
    "params_embedding",
    "params_head",
    "params_positions",
    "params_final_norm",
    "params_norms",
    "params_attention_split",
    "params_attention_kv",
    "params_attention_whole",
    "params_dense_split",
    "params_dense_whole",
    "params_router",
    "params_expert_split",
    "params_expert_whole",
    "params_shared_split",
    "params_shared_whole",
    "params_total",
    "params_active",
    "params_lookup",
)
declare_inputs(
    "",
    "plan",
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "sequence_parallel",
    "offload",
    "recompute",
    "precision",
    "schedule",
    "virtual_stages",
    "micro_batch",
    "global_batch",
    "accumulation",
    "dp_replicate",
    "dp_shard",
    "prefetch_layers",
    "max_live_params",
    "persistence_threshold",
    "recompute_budget_bytes",
    "weight_stashing",
    "vertical_sync",
    "seq_len",
    "tokens",
)
declare_inputs(
    "",
    "plan",
    "stage",
    "stage_layers",
    "stage_moe_layers",
    "stage_dense_layers",
    "stage_first",
    "stage_last",
)
declare_inputs(
    "",
    "framework",
    "flash",
    "fused_norm",
    "fused_swiglu",
    "fused_cross_entropy",
    "fused_softmax",
    "fully_sharded",
    "row_sharded",
    "greedy_optimizer",
    "bucket_elements",
    "fused_wgrad",
    "offload_grads",
    "flat_step",
    "keeps_outputs",
    "factored",
    "muon",
    "vocab_multiple",
    "overlap_grad_reduce",
    "scatter_gather",
    "syncs_once",
    "causal_flops",
    "repeats_kv",
    "whole_kv",
    "regathers_inputs",
    "selective_products",
    "alternate_products",
    "alternate_layers",
    "compiled",
    "async_tp",
    "pipeline_keeps_weights",
    "fused_norm_on_cpu",
    "norm_weight_in_fp32",
    "windows_as_masks",
    "cross_entropy_in_place",
    "in_place_whole_only",
    "loss_chunks",
    "without_logits",
    "fused_swiglu_on_cpu",
)
declare_inputs(
    "B",
    "framework",
    "compute_bytes",
    "gathered_weight_bytes",
    "param_bytes",
    "grad_bytes",
    "master_bytes",
    "moment_bytes",
    "reduce_bytes",
    "sharded_reduce_bytes",
    "ring_grad_bytes",
    "mask_bytes",
    "mask_bytes_on_cpu",
    "loss_piece_bytes",
    "loss_piece_bytes_on_cpu",
    "loss_chunk_bytes",
)
declare_inputs("FLOP/s", "device catalogue", "peak_flops", "wide_peak_flops")
declare_inputs(
    "B/s", "device catalogue or cluster", "memory_bandwidth", "intra_bandwidth", "inter_bandwidth"
)
declare_inputs("B", "device catalogue", "capacity_bytes")
declare_inputs(
    "",
    "best published MFU on this device, or one of its generation with more power, and precision",
    "best_peer_mfu",
)
declare_inputs("", "order of the norm by which published runs limit the MFU; 0: none", "peer_norm")
declare_inputs("", "workload: positions whose tokens have loss", "trained_share")
declare_inputs("B", "cluster: host_gib_per_device", "host_capacity_bytes")
declare_inputs("", "cluster", "nodes", "devices_per_node", "usd_per_hour", "power_w", "is_cpu")


@dataclass(frozen=True)
class Request:
    """One estimate to compute: a legal plan of a model on a cluster.

    `tokens` is the total to train, for `days`. `assumed` are sentences on what the request left
    open, `open_spread` the log error of the step time that this adds.
    """

    model: ModelSpec
    plan: ParallelPlan
    cluster: ClusterSpec
    seq_len: int
    framework: Framework
    tokens: float | None = None
    id: str = ""
    device: Device | None = None  # a user-defined catalogue entry; default: the cluster's
    train: TrainBody | None = None  # what is frozen or added; default: all weights are trained
    second: ModelSpec | None = None  # the teacher's shape, if it is known
    trained_share: float = 1.0  # of positions, whose tokens have loss
    assumed: tuple[str, ...] = ()
    open_spread: float = 0.0

    @property
    def entry(self) -> Device:
        """The device's catalogue entry."""
        return self.device or self.cluster.entry


def run_columns(
    model: ModelSpec, train: TrainBody | None, seq_len: int, second: ModelSpec | None = None
) -> dict[str, float]:
    """`model_columns`, and what of them is trained, added or computed a second time.

    `second` is the shape of a teacher; a reference has the model's own.
    """
    counts = model_columns(model)
    return {
        **counts,
        **training_columns(model, train, counts),
        **flops_columns(model, train, seq_len, second),
        **saved_columns(model, train),
        **second_columns(model, train, second),
        **rollout_columns(train, model),
    }


def plan_columns(plan: ParallelPlan, seq_len: int) -> dict[str, float]:
    """Degrees, codes (RECOMPUTE, SCHEDULE, PRECISION, OFFLOAD) and the batch.

    `prefetch_layers` defaults to 1.
    """
    return {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": plan.cp,
        "ep": plan.ep,
        "zero": plan.zero,
        "sequence_parallel": float(plan.sequence_parallel and plan.tp > 1),
        "offload": OFFLOAD[plan.offload],
        "recompute": RECOMPUTE[plan.recompute],
        "precision": PRECISION[plan.precision],
        "schedule": SCHEDULE[plan.schedule],
        "virtual_stages": plan.virtual_stages,
        "micro_batch": plan.micro_batch_size,
        "global_batch": plan.global_batch_size,
        "accumulation": max(1, plan.accumulation),
        "dp_replicate": plan.dp_replicate or 1,
        "dp_shard": plan.dp_shard,
        "seq_len": seq_len,
        "prefetch_layers": 1 if plan.prefetch_layers is None else plan.prefetch_layers,
        "recompute_budget_bytes": plan.recompute_budget_bytes or 0,
        "max_live_params": plan.max_live_params or 0,
        "persistence_threshold": plan.param_persistence_threshold or 0,
        "weight_stashing": float(
            plan.schedule == "pipedream" and plan.weight_stashing is not False
        ),
        "vertical_sync": float(bool(plan.vertical_sync)),
    }


def device_columns(entry: Device, cluster: ClusterSpec, precision: str) -> dict[str, float]:
    """Rates, capacities and prices of a cluster's devices."""
    return {
        "peak_flops": entry.peak(precision) * 1e12,
        "wide_peak_flops": entry.peak(entry.half if precision == "fp8" else precision) * 1e12,
        "best_peer_mfu": best_peer_mfu(entry, precision),
        "memory_bandwidth": entry.memory_gb_per_s * 1e9,
        "intra_bandwidth": (cluster.intra_node_gb_per_s or entry.intra_node_gb_per_s) * 1e9,
        "inter_bandwidth": (cluster.inter_node_gb_per_s or entry.inter_node_gb_per_s) * 1e9,
        "capacity_bytes": entry.memory_bytes,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "usd_per_hour": entry.usd_per_hour
        if cluster.usd_per_device_hour is None
        else cluster.usd_per_device_hour,
        "host_capacity_bytes": np.inf
        if cluster.host_gib_per_device is None
        else cluster.host_gib_per_device * GIB,
        "power_w": entry.power_w,
        "is_cpu": float(entry.kind == "cpu"),
    }


def table_of(requests: Sequence[Request], parameters: Mapping[str, Any]) -> Table:
    """One row per request; models and clusters may differ.

    `parameters` are the calibratable ones, scalars or `(n,)`.
    """
    rows = [
        {
            **run_columns(each.model, each.train, each.seq_len, each.second),
            **plan_columns(each.plan, each.seq_len),
            **device_columns(each.entry, each.cluster, each.plan.precision),
            **each.framework.columns(each.plan, each.model),
            "tokens": each.tokens or 0.0,
            "trained_share": each.trained_share,
        }
        for each in requests
    ]
    n = len(rows)
    columns: dict[str, Column] = {
        name: np.array([row[name] for row in rows], float) for name in rows[0]
    }
    columns |= stage_columns(columns, n, given_layers=[each.plan.stage_layers for each in requests])
    return Table({**columns, **parameters}, n)
