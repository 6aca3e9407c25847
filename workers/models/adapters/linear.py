"""A linear layer with an adapter: low-rank updates, scaled activations, weights in 4 bits.

A variant of the plain layer with the same parameters under their names, and those of the adapter.
Does not depend on which layers are adapted or on how parameters are sharded.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from workers.models.adapters import low_rank
from workers.models.adapters.nf4 import Nf4, Place, quantize_nf4
from workers.models.initialize import local_part
from workers.models.linear_variants import variant_of


class AdaptedLinear(nn.Linear):
    """`[..., K]` → `[..., N]`: W x + scale · B A x; DoRA's m / ‖W + scale · B A‖ times that.

    `ia3_l` scales outputs, or inputs if `scales_input`. `norm_group`: the ranks that share a row of
    the weight, over which DoRA's norms are summed. `nf4`: the weight is stored in 4 bits.
    """

    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None
    lora_magnitude: nn.Parameter | None
    ia3_l: nn.Parameter | None
    scale: float
    dropout: float
    scales_input: bool
    norm_group: Any
    double_quant: bool
    place: Place | None
    columns: int
    adapter_off = False  # compute without the adapter (`switch`)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if self.adapter_off:
            out = self.product(input)
            return out if self.bias is None else out + self.bias
        x = input
        if self.ia3_l is not None and self.scales_input:
            x = x * self.ia3_l
        out = self.updated(x)
        if self.lora_magnitude is not None:
            out = out * (self.lora_magnitude / self.row_norms().to(out.dtype))
        if self.bias is not None:
            out = out + self.bias
        if self.ia3_l is not None and not self.scales_input:
            out = out * self.ia3_l
        return out

    @property
    def nf4(self) -> Nf4 | None:
        """The weight in 4 bits, if it is stored so."""
        buffers: dict[str, Any] = self._buffers
        if "nf4_codes" not in buffers:
            return None
        first = 0
        if self.place is not None:
            rows, columns = self.place
            first = rows.start * self.columns + columns.start // 64
        return Nf4(
            buffers["nf4_codes"],
            buffers["nf4_scales"],
            buffers.get("nf4_groups"),
            buffers.get("nf4_mean"),
            first,
            self.columns,
        )

    def updated(self, x: Tensor) -> Tensor:
        """W x + scale · B A x, without bias; W x without an update."""
        if self.lora_A is None or self.lora_B is None:
            return self.product(x)
        dropped = self.training and self.dropout
        weight = self.nf4 or self.weight
        if not dropped and low_rank.applies(x, weight, self.lora_A, self.lora_B):
            return low_rank.low_rank_linear(x, weight, self.lora_A, self.lora_B, self.scale)
        inputs = functional.dropout(x, self.dropout) if dropped else x
        inner, out = functional.linear(inputs, self.lora_A), self.product(x)
        if low_rank.same_type(out, inner, self.lora_B):
            return low_rank.add_update(out, inner, self.lora_B, self.scale)
        return out + functional.linear(inner, self.lora_B) * self.scale

    def product(self, x: Tensor) -> Tensor:
        """W x, without bias."""
        quantized = self.nf4
        if quantized is None:
            return functional.linear(x, self.weight)
        return cast(Tensor, _Nf4Product.apply(x, quantized))  # type: ignore[no-untyped-call]

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """This rank's W, dequantized if it is stored in 4 bits."""
        quantized = self.nf4
        return self.weight.to(dtype) if quantized is None else quantized.dequantize(dtype)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """‖W + scale · B A‖ of each output in fp32, without the sum itself in memory."""
        assert self.lora_A is not None and self.lora_B is not None
        weight = self.dense_weight(torch.float32)
        a, b = self.lora_A.float(), self.lora_B.float()
        squares = weight.square().sum(1) + 2 * self.scale * ((weight @ a.T) * b).sum(1)
        squares += self.scale**2 * ((b @ (a @ a.T)) * b).sum(1)
        if self.norm_group is not None:
            dist.all_reduce(squares, group=self.norm_group)
        return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()

    @property
    def depends_on_base(self) -> bool:
        """Whether `take` has something to store."""
        return self.nf4 is not None or self.lora_magnitude is not None

    def store_nf4(self) -> None:
        """Replace the weight (on meta or with values, sharded or not) by empty 4-bit buffers."""
        weight = self.weight
        local, place = local_part(weight)
        (rows, inputs), device = local.shape, local.device
        self.columns = weight.shape[1] // 64
        sharded = (rows, inputs) != tuple(weight.shape)
        self.place = cast(Place, place) if sharded else None
        blocks = weight.shape[0] * self.columns
        scales = torch.uint8 if self.double_quant else torch.float32
        empty: dict[str, Tensor] = {
            "nf4_codes": torch.empty(rows, inputs // 2, dtype=torch.uint8, device=device),
            "nf4_scales": torch.empty(rows, inputs // 64, dtype=scales, device=device),
        }
        if self.double_quant:
            empty["nf4_groups"] = torch.empty(math.ceil(blocks / 256), device=device)
            empty["nf4_mean"] = torch.empty((), device=device)
        del self._parameters["weight"]
        for name, buffer in empty.items():
            self.register_buffer(name, buffer)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Store what depends on the base's full weight: its 4-bit codes and DoRA's magnitudes."""
        if self.nf4 is not None:
            stored = quantize_nf4(weight, double=self.double_quant)
            weight = stored.dequantize(torch.float32)
            if self.place is not None:
                stored = stored.part(self.place)
            buffers: dict[str, Any] = self._buffers
            buffers["nf4_codes"].copy_(stored.codes)
            buffers["nf4_scales"].copy_(stored.scales)
            if stored.groups is not None and stored.mean is not None:
                buffers["nf4_groups"].copy_(stored.groups)
                buffers["nf4_mean"].copy_(stored.mean)
        if self.lora_magnitude is not None:
            local, place = local_part(self.lora_magnitude)
            local.copy_(weight.float().norm(dim=1)[place])


def adapted(linear: nn.Linear, **options: Any) -> AdaptedLinear:
    """The layer's variant without any adapter yet; `options` are attributes of `AdaptedLinear`."""
    if isinstance(linear, AdaptedLinear):
        linear.__dict__.update(options)
        return linear
    defaults = {"scale": 1.0, "dropout": 0.0, "scales_input": False, "norm_group": None}
    more = {"double_quant": False, "place": None, "columns": 0}
    variant = variant_of(linear, AdaptedLinear, **{**defaults, **more, **options})
    for name in ("lora_A", "lora_B", "lora_magnitude", "ia3_l"):
        variant.register_parameter(name, None)
    return variant


class _Nf4Product(torch.autograd.Function):
    """W x with W dequantized in each pass; saves no weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Nf4) -> Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        return gradient @ ctx.weight.dequantize(gradient.dtype), None
