"""Which weights are rounded to few bits, and how many inputs share a scale: what training, the
engine that answers and
the list of what the engine runs must agree on.

Knows shapes; does not round.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.contracts.specs.model import ModelSpec

GROUPS = (128, 64, 32, 16)


def group_for(widths: Iterable[int], wanted: int = GROUPS[0]) -> int:
    """The largest size of a group, at most `wanted`, that divides every width; 16 where none does."""
    found = list(widths)
    return next(
        (each for each in GROUPS if each <= wanted and all(width % each == 0 for width in found)),
        GROUPS[-1],
    )


def linear_widths(model: ModelSpec) -> list[int]:
    """Inputs of the linear layers inside blocks, each number once."""
    latents = []
    if model.mla is not None:
        latents = [model.mla.q_lora_rank or model.hidden, model.mla.kv_lora_rank]
    if model.mfa is not None:
        latents = [model.mfa.qk_rank]
    return sorted({model.hidden, *latents, *dealt_widths(model)})


def dealt_widths(model: ModelSpec) -> list[int]:
    """Those of them whose inputs tensor parallelism deals out: attention's heads, what MLPs and
    experts widen to.
    """
    if model.mla is not None:
        heads = model.heads * model.mla.v_head_dim
    elif model.mfa is not None:
        heads = model.mfa.heads * model.mfa.head_dim
    else:
        heads = model.heads * model.head_dim
    found = {heads}
    if model.moe_layers < model.layers:
        found.add(model.ffn)
    if model.moe is not None and model.moe_layers:
        found.add(model.moe.expert_ffn)
        if model.moe.shared_experts:
            found.add(model.moe.shared_width)
    return sorted(found)
