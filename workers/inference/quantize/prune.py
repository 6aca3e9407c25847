"""Structured pruning: removes the least important neurons and heads and refits the rest.

Removes the same number in every layer, so the result is a plain decoder of a narrower shape.
Supports dense blocks with softmax attention. Shapes: K inputs of a layer, S of them kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec
from workers.inference.quantize.calibrate import InputStats, damped
from workers.models.decoder import Block
from workers.models.layers.attention import Attention
from workers.models.layers.mlp import Mlp


def pruned_spec(spec: ModelSpec, *, neurons: float, heads: float) -> ModelSpec:
    """The shape after removing the share `neurons` of each layer's neurons and `heads` of its
    key-value heads with their query heads.

    Raises ValueError for shares that leave nothing and for shapes that cannot be pruned.
    """
    if spec.moe is not None or spec.attention != "softmax":
        raise ValueError(
            f"{spec.name} has experts or latent attention; only dense layers with plain heads are "
            "pruned"
        )
    if not (0 <= neurons < 1 and 0 <= heads < 1) or neurons == heads == 0:
        raise ValueError(
            f"shares of {neurons} neurons and {heads} heads prune nothing or everything. Use 0.2 "
            "and 0."
        )
    # multiples of 16, for fast products
    ffn = max(16, round(spec.ffn * (1 - neurons) / 16) * 16) if neurons else spec.ffn
    retained = max(1, round(spec.kv_heads * (1 - heads)))
    changes = {
        "ffn": min(ffn, spec.ffn),
        "kv_heads": retained,
        "heads": spec.heads // spec.kv_heads * retained,
        "head_dim": spec.head_dim,
        "name": f"{spec.name}-pruned",
    }
    return ModelSpec.from_dict({**spec.to_dict(), **changes})


@torch.no_grad()
def prune_block(
    block: Block, inputs: dict[str, InputStats], to: ModelSpec
) -> dict[str, dict[str, float]]:
    """Prune in place to the widths of `to`.

    Returns `{retained, error, unfitted_error}` of `attn.o` and `mlp.down`.
    """
    attn, mlp = block.attn, block.mlp
    assert isinstance(attn, Attention) and isinstance(mlp, Mlp)
    reports = {}
    if to.ffn < mlp.down.in_features:
        importance = _importance(mlp.down, inputs["mlp.down"])
        retained = importance.topk(to.ffn).indices.sort().values
        reports["mlp.down"] = _columns(mlp, "down", retained, inputs["mlp.down"])
        for name in ("gate", "up"):
            if getattr(mlp, name) is not None:
                _rows(mlp, name, retained)
    width = attn.head_dim * to.heads
    if width < attn.o.in_features:
        groups = attn.k.out_features // attn.head_dim
        by_group = _importance(attn.o, inputs["attn.o"]).view(groups, -1)
        best = by_group.sum(1).topk(to.kv_heads).indices.sort().values
        columns = (
            torch.arange(attn.o.in_features, device=best.device).view(groups, -1)[best].flatten()
        )
        reports["attn.o"] = _columns(attn, "o", columns, inputs["attn.o"])
        _rows(attn, "q", columns)
        rows = (
            torch.arange(attn.k.out_features, device=best.device).view(groups, -1)[best].flatten()
        )
        for name in ("k", "v"):
            _rows(attn, name, rows)
    return reports


def _importance(layer: nn.Linear, inputs: InputStats) -> Tensor:
    """`[K]`: each input's share of the output energy, |w|² · mean x² (Wanda, arXiv 2306.11695)."""
    return layer.weight.float().square().sum(0) * inputs.gram.diagonal()


def _columns(
    parent: nn.Module, name: str, retained: Tensor, inputs: InputStats
) -> dict[str, float]:
    """Remove inputs and fit the rest by least squares: W · G[:, S] · G[S, S]⁻¹."""
    layer: nn.Linear = getattr(parent, name)
    weight = layer.weight.float()
    gram = damped(inputs.gram)
    fitted = torch.linalg.solve(gram[retained][:, retained], (weight @ gram)[:, retained].T).T
    refitted, plain = torch.zeros_like(weight), torch.zeros_like(weight)
    refitted[:, retained], plain[:, retained] = fitted, weight[:, retained]
    energy = inputs.error(weight) or 1.0
    _put(parent, name, fitted.to(layer.weight.dtype), layer.bias)
    return {
        "kept": float(len(retained)),
        "error": inputs.error(refitted - weight) / energy,
        "unfitted_error": inputs.error(plain - weight) / energy,
    }


def _rows(parent: nn.Module, name: str, retained: Tensor) -> None:
    layer: nn.Linear = getattr(parent, name)
    _put(parent, name, layer.weight[retained], None if layer.bias is None else layer.bias[retained])


def _put(parent: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    setattr(parent, name, linear)
