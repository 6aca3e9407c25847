"""Tensor-parallel plan of a decoder block: which parameters are sharded, along which dim, and how.

Attention is split by heads, MLPs and experts by width (arXiv 1909.08053, section 3). Parameters
that the plan does not name are replicated. Does not depend on process groups or on a sharding API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.contracts.specs.model import ModelSpec

# column: by outputs · row: by inputs, outputs are partial sums ·
# kv_heads: by key-value heads; with fewer heads than ranks, several ranks use the same head
Style = Literal["column", "row", "kv_heads"]

# dim of `embed.weight` and `head.weight` that training shards; inference replicates both
VOCABULARY_DIM = 0
_MLP: dict[str, Style] = {"gate": "column", "up": "column", "down": "row"}
_MODULES: dict[str, Style] = {
    "attn.q": "column",
    "attn.q_up": "column",
    "attn.kv_up": "column",
    "attn.k": "kv_heads",
    "attn.v": "kv_heads",
    "attn.o": "row",
    **{f"mlp.{name}": style for name, style in _MLP.items()},
    **{f"mlp.shared.{name}": style for name, style in _MLP.items()},
    **{f"mlp.experts.{name}": style for name, style in _MLP.items()},
}


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """How one parameter is sharded; `dim` None: replicated, and added to the partial sums once."""

    style: Style
    dim: int | None


def block_plan(spec: ModelSpec) -> dict[str, ParameterShard]:
    """By parameter name within a block; names that the model lacks are included.

    MFA's one key-value head is replicated, as are latents and norms.
    """
    plan = {}
    for module, style in _MODULES.items():
        if style == "kv_heads" and spec.attention != "softmax":
            continue
        stacked = int(module.startswith("mlp.experts."))  # weight [E, out, in], bias [E, out]
        row = style == "row"
        plan[f"{module}.weight"] = ParameterShard(style, stacked + row)
        plan[f"{module}.bias"] = ParameterShard(style, None if row else stacked)
        # of low-rank updates the factor at the sharded side; the other one is replicated
        if row:
            plan[f"{module}.lora_A"] = ParameterShard(style, 1)
            plan[f"{module}.ia3_l"] = ParameterShard(style, 0)
        else:
            for name in ("lora_B", "lora_magnitude", "ia3_l"):
                plan[f"{module}.{name}"] = ParameterShard(style, 0)
    if spec.attention == "softmax":
        for name in ("prefix_k", "prefix_v"):
            plan[f"attn.{name}"] = ParameterShard("kv_heads", 0)
    return plan
