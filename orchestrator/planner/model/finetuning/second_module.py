"""Memory and time of a second, frozen module: the reference or the teacher of an objective.

It is sharded by the same plan and stored in the compute type, without gradients or optimizer
states. Does not depend on what the objective does with its outputs.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, declare_inputs, term
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

declare_inputs("", "objective", "has_reference")
declare_inputs("B", "measured with torch: fp32 tensors of a divergence", "divergence_bytes")
# fp32 bytes per logit at the peak of a divergence: distributions of both and their products
DIVERGENCE_BYTES = {"forward_kl": 20.0, "reverse_kl": 20.0, "jsd": 48.0}
declare_inputs(
    "parameters",
    "the teacher's shape",
    "teacher_dense_params",
    "teacher_expert_params",
    "teacher_embedding_params",
    "teacher_head_params",
    "teacher_norm_params",
)
declare_inputs("", "the teacher's shape", "teacher_tied")


def second_columns(
    model: ModelSpec, train: TrainBody | None, second: ModelSpec | None
) -> dict[str, float]:
    """`has_reference`, and the parameters of a teacher: of its layers, experts, table and head.

    `divergence_bytes` per logit: what a divergence holds besides both models' logits.
    """
    names = ("dense", "expert", "embedding", "head", "norm")
    columns = {f"teacher_{name}_params": 0.0 for name in names}
    columns["teacher_tied"] = 0.0
    columns["has_reference"] = float(train is not None and holds_reference(train))
    distill = None if train is None else train.distill
    columns["divergence_bytes"] = DIVERGENCE_BYTES[distill.loss] if distill is not None else 0.0
    if train is None or train.distill is None or second is None:
        return columns
    count = parameter_count(second)
    experts = count.moe_layers * count.expert * (second.moe.experts if second.moe else 0)
    table = count.embedding + count.positions
    columns["teacher_embedding_params"] = table
    columns["teacher_head_params"] = count.head or count.embedding
    columns["teacher_norm_params"] = count.final_norm
    columns["teacher_tied"] = float(count.head == 0)
    columns["teacher_expert_params"] = experts
    rest = count.total - table - count.head - count.final_norm - experts
    columns["teacher_dense_params"] = rest
    return columns


def holds_reference(train: TrainBody) -> bool:
    """Whether a copy of the model's weights is stored as the reference of preferences."""
    return train.distill is None and train.holds_second


@term(
    "parameters",
    "(layers / pp + experts / (pp ep) + table on the first and head on the last stage) / tp",
    "a tied head is a copy on a stage without the table",
)
def teacher_stage_params(
    teacher_dense_params: Column,
    teacher_expert_params: Column,
    teacher_embedding_params: Column,
    teacher_head_params: Column,
    teacher_norm_params: Column,
    teacher_tied: Column,
    stage_first: Column,
    stage_last: Column,
    pp: Column,
    tp: Column,
    ep: Column,
) -> Column:
    """Parameters of a teacher on a stage before ZeRO, (S, n)."""
    layers = (teacher_dense_params + teacher_expert_params / ep) / pp
    head = teacher_head_params * (1 - teacher_tied * stage_first) + teacher_norm_params
    head = stage_last * head
    return np.asarray((layers + stage_first * teacher_embedding_params + head) / tp)


@term(
    "B",
    "(has_reference x parameters + teacher's) x compute_bytes, sharded if params_sharded",
    "the frozen reference of preference optimization (arXiv 2305.18290) or the teacher of "
    "distillation, without gradients",
)
def reference_bytes(
    has_reference: Column,
    stage_params: Column,
    sharded_params: Column,
    teacher_stage_params: Column,
    shard: Column,
    params_sharded: Column,
    compute_bytes: Column,
) -> Column:
    """Weights of the frozen module on the device, (S, n)."""
    sharded = params_sharded == 1
    reference = has_reference * np.where(sharded, sharded_params, stage_params)
    teacher = np.where(sharded, teacher_stage_params / shard, teacher_stage_params)
    return np.asarray((reference + teacher) * compute_bytes)


@term(
    "",
    "second_flops_per_token / (6 (params_active - params_lookup) / 3 + attention forward)",
    "FLOPs of the second module's forward pass relative to the trained model's",
)
def second_share(
    second_flops_per_token: Column,
    params_active: Column,
    params_lookup: Column,
    attention_forward_flops_per_token: Column,
) -> Column:
    """Forward passes of the trained model that the second module's is worth."""
    own = 2 * (params_active - params_lookup) + attention_forward_flops_per_token
    return np.asarray(second_flops_per_token / own)
