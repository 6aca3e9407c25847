"""A decoder's fp32 products on AMD's CPUs by oneDNN, from weights laid out for it once; those of
one input as one.

MKL leaves the AVX-512 units of AMD's CPUs aside. Zen 5, one core, 16 tokens, 576 x 3072: 1.47 ms by
MKL, 0.76 by
oneDNN, 0.54 from a weight in oneDNN's own layout. Same weights and module tree, fp32 throughout;
knows no caches.
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

_ROWS = 128  # the layout for so many tokens was the fastest, or level, from 1 to 48
_SHARE = 0.25  # of the free memory that the second copy of the weights may take


class Product(nn.Module):
    """`x @ weight.T + bias` from a copy of the weight in oneDNN's layout; several layers of one
    input become one.

    The copy is no parameter: names, values and number of a model's parameters stay what they were.
    It is never written
    to, so copies of a model share it.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (None,)
    ) -> None:
        super().__init__()
        whole = (
            torch.cat([each.detach() for each in weights])
            if len(weights) > 1
            else weights[0].detach()
        )
        with_bias = [each.detach() for each in biases if each is not None]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), _ROWS)
        self._bias = torch.cat(with_bias) if with_bias else None
        self.widths = [each.shape[0] for each in weights]
        self.of: tuple[nn.Module, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Product:
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return found


def lay_out(decoder: Decoder) -> None:
    """Where it pays, and where memory holds the weights twice. A model whose weights change
    afterwards has to be made
    anew; one whose layers are not plain (quantised, sharded) keeps these as they are."""
    weight = next(decoder.parameters())
    if getattr(decoder, "_laid_out", False) or not (
        _plain(weight) and onednn_pays("_reorder_linear_weight")
    ):
        return
    free_bytes = (
        capacity_bytes(weight.device, local_world_size=1) - process_memory(weight.device)[0]
    )
    if sum(each.nbytes for each in decoder.parameters()) > _SHARE * free_bytes:
        return
    decoder._laid_out = True  # type: ignore[assignment]
    for module in [*decoder.modules()]:
        _replace(module)
    if decoder.part.last and decoder.head is None:
        assert decoder.embed is not None
        decoder.head = Product([decoder.embed.weight])  # type: ignore[assignment]


def _replace(module: Any) -> None:
    kind = type(module)
    if kind is Attention and _all_plain(module.q, module.k, module.v):
        module.forward = partial(_attended, module, _joined(module.q, module.k, module.v))
    elif kind is Mlp and module.gate is not None and _all_plain(module.gate, module.up):
        module.forward = partial(_gated, module, _joined(module.gate, module.up))
    elif _all_plain(module) and not getattr(module, "_joined", False):
        module.forward = _joined(module).forward


def _joined(*layers: nn.Linear) -> Product:
    for each in layers:
        each._joined = True  # type: ignore[assignment]
    product = Product([each.weight for each in layers], [each.bias for each in layers])
    product.of = layers
    return product


def _attended(
    attention: Attention,
    product: Product,
    x: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    documents: Documents | None = None,
) -> Tensor:
    """`Attention.forward` with one product, unless other layers have been put in."""
    if attention.q is not product.of[0]:
        return Attention.forward(attention, x, rope, documents)
    q, k, v = (
        each.unflatten(-1, (-1, attention.head_dim))
        for each in product(x).split(product.widths, dim=-1)
    )
    return attention.attended(q, k, v, rope, documents)


def _gated(mlp: Mlp, product: Product, x: Tensor) -> Tensor:
    if mlp.gate is not product.of[0]:
        return Mlp.forward(mlp, x)
    gate, up = product(x).split(product.widths, dim=-1)
    found: Tensor = mlp.down(mlp.operations.gated(gate, up, mlp.activation))
    return found


def _all_plain(*layers: Any) -> bool:
    return all(type(each) is nn.Linear and _plain(each.weight) for each in layers) and (
        len({each.bias is None for each in layers}) == 1
    )


def _plain(weight: Tensor) -> bool:
    return (
        type(weight.data) is Tensor
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
    )
