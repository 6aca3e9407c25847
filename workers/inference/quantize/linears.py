"""Quantized linear layers: int8, W8A8, int4 in groups, FP8 in tiles, and low rank.

Each replaces an `nn.Linear`, built from a weight `[N, K]` or its packed parts. Does not depend on
a model. Shapes: N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import fp8_matmul, int4_matmul, quantize_1x128, quantize_128x128
from kernels.int4.pack import check_group, pack_codes, unpack
from kernels.int8 import int8_matmul, quantize_int8
from workers.contracts.specs.weight_rounding import GROUPS
from workers.models.hf.quantized_formats import Packed

GROUP = 128
# from this many rows on a CPU decodes the weight and multiplies in bf16: 64 rows of 1536 x 576 take
# 0.43 ms, 0.82 ms by codes
FEW_ROWS = 24


class QuantizedLinear(nn.Module):
    """`x [..., K]` → `[..., N]` in x's dtype."""

    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = inputs, outputs, dtype
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x · weightᵀ + bias."""
        out = self.product(x)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x · weightᵀ, without the bias."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The decoded weight `[N, K]`, computed at each access."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())


class EightBitLinear(QuantizedLinear):
    """int8 codes `[N, K]` and one scale per output; subclasses define the product."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes_NK: Tensor, scales_N: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(codes_NK.shape[1], codes_NK.shape[0], bias, scales_N.dtype)
        self.register_buffer("codes", codes_NK.contiguous())
        self.register_buffer("scales", scales_N.contiguous())

    @property
    def weight(self) -> Tensor:
        """The decoded weight `[N, K]`."""
        return (self.codes.float() * self.scales.float().unsqueeze(1)).to(self.dtype)


class Int8Linear(EightBitLinear):
    """Eight bits, one scale per output; activations are not quantized (LLM.int8(), arXiv
    2208.07339, section 2.1).
    """

    def __init__(self, codes_NK: Tensor, scales_N: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(codes_NK, scales_N, bias)
        self._half = scales_N.to(torch.bfloat16) if codes_NK.device.type == "cpu" else None

    def product(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        if self._half is None:
            return int8_matmul(x, self.codes, self.scales)
        # bf16 at any run precision: torch's int8 product is 7 times slower in fp32
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if len(rows) < FEW_ROWS and self.in_features % 16 == 0:
            out = torch._weight_int8pack_mm(rows, self.codes, self._half)
        else:
            out = functional.linear(rows, self.codes.to(torch.bfloat16)) * self._half
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8ActivationsLinear(EightBitLinear):
    """W8A8: one scale per output and one dynamic scale per token; sums are exact in int32 (arXiv
    2211.10438).
    """

    def product(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        rows = x.reshape(-1, self.in_features).float()
        scale = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (rows / scale).round().to(torch.int8)
        summed = self._summed(codes).float() * scale * self.scales.float()
        return summed.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _summed(self, codes: Tensor) -> Tensor:
        if not codes.is_cuda:
            return torch._int_mm(codes, self.codes.T)
        # cuBLASLt wants more than 16 rows, and sides that divide by 8
        rows, inputs, outputs = codes.shape[0], -self.in_features % 8, -self.out_features % 8
        wide = functional.pad(codes, (0, inputs, 0, max(0, 17 - rows)))
        weight = (
            functional.pad(self.codes, (0, inputs, 0, outputs)) if inputs or outputs else self.codes
        )
        return torch._int_mm(wide, weight.T)[:rows, : self.out_features]


class Int4Linear(QuantizedLinear):
    """Four bits, one scale and zero per group of inputs: w = (code - zero) · scale (AWQ, arXiv
    2306.00978).

    `order [K]` maps positions to inputs if groups were made by importance (GPTQ's act-order). On a
    CPU the codes use the layout of torch's int4 product if it supports the shape, else the layout
    of `int4_matmul`.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None

    def __init__(
        self,
        codes_KN: Tensor,
        scales_GN: Tensor,
        zeros_GN: Tensor,
        group: int,
        bias: Tensor | None = None,
        *,
        order: Tensor | None = None,
    ) -> None:
        check_group(group)
        inputs, outputs = codes_KN.shape
        super().__init__(inputs, outputs, bias, scales_GN.dtype)
        self.group = group
        self.register_buffer("order", order)
        self._by_torch = fits_torch(codes_KN.device, inputs, outputs, group)
        if self._by_torch:
            qweight = torch._convert_weight_to_int4pack_for_cpu(
                codes_KN.T.contiguous().to(torch.int32), 1
            )
            # torch's: (code - 8) · scale + shift
            shifts = (8.0 - zeros_GN.float()) * scales_GN.float()
            scales = torch.stack((scales_GN.float(), shifts), -1).to(torch.bfloat16)
        else:
            qweight, scales = pack_codes(codes_KN), scales_GN.contiguous()
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros_GN.to(torch.uint8).contiguous())

    def product(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        x = x if self.order is None else x[..., self.order]
        if not self._by_torch:
            return int4_matmul(x, self.qweight, self.scales, self.zeros, self.group)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        out = torch._weight_int4pack_mm_for_cpu(rows, self.qweight, self.group, self.scales)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def codes(self) -> Tensor:
        """`[K, N]` uint8, by position."""
        if not self._by_torch:
            return unpack(self.qweight, self.in_features)
        # torch's packing is private: a product with the identity and unit scales reads it exactly
        scales = torch.zeros(self.in_features // self.group, self.out_features, 2)
        scales[..., 0] = 1.0
        eye = torch.eye(self.in_features)
        return (
            (torch._weight_int4pack_mm_for_cpu(eye, self.qweight, self.group, scales) + 8)
            .round()
            .to(torch.uint8)
        )

    @property
    def weight(self) -> Tensor:
        """The decoded weight `[N, K]`."""
        scale = (self.scales[..., 0] if self._by_torch else self.scales).float()
        scale, zero = (
            x.repeat_interleave(self.group, 0)[: self.in_features]
            for x in (scale, self.zeros.float())
        )
        full = ((self.codes().float() - zero) * scale).T
        if self.order is not None:
            full = full[:, self.order.argsort()]
        return full.to(self.dtype)


class Fp8Linear(QuantizedLinear):
    """e4m3, one scale per weight tile of 128 x 128 and per activation row of 128 (DeepSeek-V3,
    section 3.3).
    """

    codes: Tensor
    scales: Tensor

    def __init__(
        self, codes_NK: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        super().__init__(codes_NK.shape[1], codes_NK.shape[0], bias, dtype)
        self.register_buffer("codes", codes_NK.contiguous())
        self.register_buffer("scales", scales.contiguous())

    def product(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        return fp8_matmul(*quantize_1x128(x), self.codes, self.scales, out_dtype=x.dtype)

    @property
    def weight(self) -> Tensor:
        """The decoded weight `[N, K]`."""
        scales = self.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (self.codes.float() * scales[: self.out_features, : self.in_features]).to(self.dtype)


def fits_torch(device: torch.device, inputs: int, outputs: int, group: int) -> bool:
    """Whether torch's int4 product for CPUs supports the shape (torch 2.13: groups of 32 to 256,
    outputs divisible by 16).
    """
    divides = inputs % group == 0 and outputs % 16 == 0 and group in (32, 64, 128, 256)
    return device.type == "cpu" and divides


def pack_weight(kind: str, weight: Tensor, group: int = GROUP) -> Packed:
    """Round `weight [N, K]` to the nearest codes: kind is int8, w8a8, int4 or fp8.

    Raises ValueError.
    """
    if kind in ("int8", "w8a8"):
        return Packed(kind, *quantize_int8(weight))
    if kind == "fp8":
        return Packed(kind, *quantize_128x128(weight))
    if kind == "int4":
        return Packed(kind, *round_groups(weight, group), group)
    raise ValueError(f"unknown quantization {kind!r}; choose int8, w8a8, int4 or fp8")


def quantize_linear(
    weight: Tensor, kind: str, *, bias: Tensor | None = None, group: int = GROUP
) -> QuantizedLinear:
    """The layer of `pack_weight`. Raises ValueError."""
    return build_layer(pack_weight(kind, weight, group), bias, weight.dtype, weight.device)


def build_layer(
    packed: Packed, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> QuantizedLinear:
    """The layer that computes with a packed weight; scales are rounded to the run's precision."""
    codes, scales = packed.codes.to(device), packed.scales.to(device)
    if packed.kind == "int4":
        assert packed.zeros is not None
        order = None if packed.order is None else packed.order.to(device)
        # one group of all inputs may have any size: round it up to a supported one
        single = packed.group >= len(codes) and packed.group not in GROUPS
        group = -(-packed.group // 128) * 128 if single else packed.group
        return Int4Linear(
            codes, scales.to(dtype), packed.zeros.to(device), group, bias, order=order
        )
    if packed.kind == "low-rank":
        return LowRankLinear(codes.to(dtype), scales.to(dtype), bias)
    if packed.kind == "fp8":
        return Fp8Linear(codes, scales, dtype, bias)
    return (Int8ActivationsLinear if packed.kind == "w8a8" else Int8Linear)(
        codes, scales.to(dtype), bias
    )


class LowRankLinear(QuantizedLinear):
    """w = left · right, `[N, R]` and `[R, K]`: R · (N + K) numbers instead of N · K."""

    left: Tensor
    right: Tensor

    def __init__(self, left_NR: Tensor, right_RK: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(right_RK.shape[1], left_NR.shape[0], bias, left_NR.dtype)
        self.register_buffer("left", left_NR.contiguous())
        self.register_buffer("right", right_RK.contiguous())

    def product(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        return functional.linear(functional.linear(x, self.right), self.left)

    @property
    def weight(self) -> Tensor:
        """The full weight `[N, K]`."""
        return self.left @ self.right


def round_groups(
    weight: Tensor, group: int, *, levels: int = 16, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """codes `[K, N]` uint8, scales and zeros `[G, N]`: each group's range, 0 included, is divided
    into the levels.

    Scales are rounded to `dtype`, by default the weight's, before codes are computed. Raises
    ValueError for a weight that is not finite.
    """
    n, k = weight.shape
    if not bool(weight.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity, which four bits cannot represent")
    wide = functional.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    low, high = wide.amin(2).clamp_max(0), wide.amax(2).clamp_min(0)
    dtype = dtype or weight.dtype
    scales = ((high - low) / (levels - 1)).to(dtype).clamp_min(torch.finfo(dtype).tiny)
    zeros = (-low / scales.float()).round().clamp(0, levels - 1)
    codes = ((wide / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, levels - 1)
    return (
        codes.view(n, -1)[:, :k].T.to(torch.uint8),
        scales.T.contiguous(),
        zeros.T.to(torch.uint8).contiguous(),
    )
