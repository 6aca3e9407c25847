"""Which weights are quantized to few bits, and how many inputs share a scale.

Training, inference and the lists of supported features use it. Does not quantize.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.contracts.specs.model import ModelSpec

GROUPS = (128, 64, 32, 16)


def group_for(widths: Iterable[int], most: int = GROUPS[0]) -> int:
    """The largest group size, at most `most`, that divides every width; 16 if none does."""
    numbers = list(widths)
    return next(
        (size for size in GROUPS if size <= most and all(n % size == 0 for n in numbers)),
        GROUPS[-1],
    )


def linear_widths(model: ModelSpec) -> list[int]:
    """The distinct input widths of linear layers inside blocks, ascending."""
    latents = []
    if model.mla is not None:
        latents = [model.mla.q_lora_rank or model.hidden, model.mla.kv_lora_rank]
    if model.mfa is not None:
        latents = [model.mfa.qk_rank]
    return sorted({model.hidden, *latents, *sharded_widths(model)})


def sharded_widths(model: ModelSpec) -> list[int]:
    """The input widths that tensor parallelism shards: of attention outputs, MLPs and experts."""
    if model.mla is not None:
        heads = model.heads * model.mla.v_head_dim
    elif model.mfa is not None:
        heads = model.mfa.heads * model.mfa.head_dim
    else:
        heads = model.heads * model.head_dim
    widths = {heads}
    if model.moe_layers < model.layers:
        widths.add(model.ffn)
    if model.moe is not None and model.moe_layers:
        widths.add(model.moe.expert_ffn)
        if model.moe.shared_experts:
            widths.add(model.moe.shared_width)
    return sorted(widths)
