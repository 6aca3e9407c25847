"""fp32 matrix products of a decoder on AMD CPUs by oneDNN, with prepacked and fused weights.

MKL does not use the AVX-512 units of AMD CPUs. Zen 5, one core, 16 tokens, 576 x 3072: 1.47 ms by
MKL, 0.76 by oneDNN, 0.54 from a prepacked weight. Weights and module tree stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.metrics.memory import capacity_bytes, process_memory
from workers.models.decoder import Decoder
from workers.models.layers.attention import Attention
from workers.models.layers.documents import Documents
from workers.models.layers.mlp import Mlp
from workers.models.onednn import onednn_pays

_ROWS = 128  # the layout for this many tokens was the fastest, or equal, from 1 to 48 tokens
_SHARE = 0.25  # of the free memory, for the second copy of the weights


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` from a copy in oneDNN's layout; fuses layers of one input.

    The copy is not a parameter, so the model's parameters stay the same. Copies of a model share
    it.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (None,)
    ) -> None:
        super().__init__()
        self._sources = [weight.detach() for weight in weights]
        self._biases = [bias.detach() for bias in biases if bias is not None]
        self.update()
        self.widths = [weight.shape[0] for weight in weights]
        self.layers: tuple[nn.Module, ...] = ()

    def update(self) -> None:
        """Pack the weights again after they have changed."""
        sources = self._sources
        fused = torch.cat(sources) if len(sources) > 1 else sources[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(fused.contiguous(), _ROWS)
        self._bias = torch.cat(self._biases) if self._biases else None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        return self

    def forward(self, x: Tensor) -> Tensor:
        """`[..., sum of widths]`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


def use_onednn_layout(decoder: Decoder) -> None:
    """Use oneDNN's layout if it is faster and memory suffices for a second copy of the weights.

    Call `update_onednn_layout` after weights have changed. Layers that are not plain (quantized,
    sharded) stay.
    """
    weight = next(decoder.parameters())
    if getattr(decoder, "_laid_out", False) or not (
        _plain(weight) and onednn_pays("_reorder_linear_weight")
    ):
        return
    free_bytes = (
        capacity_bytes(weight.device, local_world_size=1) - process_memory(weight.device)[0]
    )
    if sum(parameter.nbytes for parameter in decoder.parameters()) > _SHARE * free_bytes:
        return
    packed: list[PackedLinear] = []
    for module in [*decoder.modules()]:
        _replace(module, packed)
    if decoder.part.last and decoder.head is None:
        assert decoder.embed is not None
        packed.append(PackedLinear([decoder.embed.weight]))
        decoder.head = packed[-1]  # type: ignore[assignment]
    decoder._laid_out = tuple(packed)  # type: ignore[assignment]


def update_onednn_layout(decoder: Decoder) -> None:
    """Pack changed weights again, if the decoder uses oneDNN's layout."""
    for each in getattr(decoder, "_laid_out", None) or ():
        each.update()


def joined_product(layer: nn.Module) -> PackedLinear | None:
    """The product that computes this linear together with others of the same input, if any."""
    product: PackedLinear | None = layer.__dict__.get("_product")
    # a copied layer shares the product but is computed alone
    joined = product is not None and any(each is layer for each in product.layers)
    return product if product is not None and joined and len(product.layers) > 1 else None


def _replace(module: Any, packed: list[PackedLinear]) -> None:
    kind = type(module)
    if kind is Attention and _all_plain(module.q, module.k, module.v):
        packed.append(_fuse(module.q, module.k, module.v))
        module.forward = partial(_attend, module, packed[-1])
    elif kind is Mlp and module.gate is not None and _all_plain(module.gate, module.up):
        packed.append(_fuse(module.gate, module.up))
        module.forward = partial(_gated_mlp, module, packed[-1])
    elif _all_plain(module) and "_product" not in module.__dict__:
        packed.append(_fuse(module))
        module.forward = packed[-1].forward


def _fuse(*layers: nn.Linear) -> PackedLinear:
    product = PackedLinear([layer.weight for layer in layers], [layer.bias for layer in layers])
    product.layers = layers
    for layer in layers:
        layer.__dict__["_product"] = product  # not a submodule
    return product


def _attend(
    attention: Attention,
    product: PackedLinear,
    x: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    documents: Documents | None = None,
) -> Tensor:
    """`Attention.forward` with one product, unless its layers were replaced."""
    if attention.q is not product.layers[0]:
        return Attention.forward(attention, x, rope, documents)
    q, k, v = (
        part.unflatten(-1, (-1, attention.head_dim))
        for part in product(x).split(product.widths, dim=-1)
    )
    return attention.attend_heads(q, k, v, rope, documents)


def _gated_mlp(mlp: Mlp, product: PackedLinear, x: Tensor) -> Tensor:
    if mlp.gate is not product.layers[0]:
        return Mlp.forward(mlp, x)
    gate, up = product(x).split(product.widths, dim=-1)
    out: Tensor = mlp.down(mlp.operations.gated(gate, up, mlp.activation))
    return out


def _all_plain(*layers: Any) -> bool:
    return all(type(layer) is nn.Linear and _plain(layer.weight) for layer in layers) and (
        len({layer.bias is None for layer in layers}) == 1
    )


def _plain(weight: Tensor) -> bool:
    return (
        type(weight.data) is Tensor
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
    )
