"""FLOPs that recomputation adds to a model's: the difference between HFU and MFU.

Does not depend on time or devices.
"""

from __future__ import annotations

from workers.contracts.catalog.counts import attention_width, parameter_count
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan


def hardware_factor(
    model: ModelSpec,
    plan: ParallelPlan,
    seq_len: int,
    *,
    flops_per_token: float,
    recomputed_share: float | None = None,
) -> float:
    """Executed over model FLOPs of a training step; 1 without recomputation.

    `flops_per_token` are the model FLOPs of the run (`training_flops_per_token`).
    Full recomputation repeats the blocks' forward pass, not the head's (arXiv 2104.04473, eq. 3);
    selective that of the attention core. `recomputed_share` is the share of the blocks' forward
    FLOPs that recompute auto repeats.
    """
    count = parameter_count(model)
    core = 4 * model.layers * attention_width(model) * seq_len
    blocks = (
        2 * (count.active - count.embedding - count.head - count.positions - count.final_norm)
        + core
    )
    more = {
        "none": 0.0,
        "selective": core,
        "full": blocks,
        "auto": blocks * (1.0 if recomputed_share is None else recomputed_share),
    }
    return 1 + more[plan.recompute] / flops_per_token
