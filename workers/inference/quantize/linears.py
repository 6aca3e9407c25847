"""Linear layers whose weights are kept in few bits: int8, int4 in groups, FP8 in tiles, and int8
with int8 activations.

Each is made of a weight `[N, K]` or of its parts, and stands where an `nn.Linear` stood. Knows one
layer, no model.
Shapes: N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import fp8_matmul, int4_matmul, quantize_1x128, quantize_128x128
from kernels.int4.pack import check_group, packed, unpack
from kernels.int8 import int8_matmul, quantize_int8
from workers.contracts.specs.weight_rounding import GROUPS
from workers.models.hf.packed import Packed

GROUP = 128
# rows from which a CPU decodes the weight and multiplies in bf16: 64 of 1536 x 576 take 0.43 ms so,
# 0.82 ms by codes
FEW_ROWS = 24


class QuantisedLinear(nn.Module):
    """`x [..., K]` → `[..., N]` in x's dtype.

    `weight` is decoded anew each time that it is asked for.
    """

    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = inputs, outputs, dtype
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self.buffers())


class EightBits(QuantisedLinear):
    """int8 codes `[N, K]` and a scale an output, however they multiply."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes_NK: Tensor, scales_N: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(codes_NK.shape[1], codes_NK.shape[0], bias, scales_N.dtype)
        self.register_buffer("codes", codes_NK.contiguous())
        self.register_buffer("scales", scales_N.contiguous())

    @property
    def weight(self) -> Tensor:
        return (self.codes.float() * self.scales.float().unsqueeze(1)).to(self.dtype)


class Int8Linear(EightBits):
    """Eight bits and a scale an output; activations as they are (LLM.int8(), arXiv 2208.07339,
    section 2.1).
    """

    def __init__(self, codes_NK: Tensor, scales_N: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(codes_NK, scales_N, bias)
        self._half = scales_N.to(torch.bfloat16) if codes_NK.device.type == "cpu" else None

    def product(self, x: Tensor) -> Tensor:
        if self._half is None:
            return int8_matmul(x, self.codes, self.scales)
        # bf16 whatever the run's precision: torch's product for int8 weights is 7 times as slow in
        # fp32
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if len(rows) < FEW_ROWS and self.in_features % 16 == 0:
            out = torch._weight_int8pack_mm(rows, self.codes, self._half)
        else:
            out = functional.linear(rows, self.codes.to(torch.bfloat16)) * self._half
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8ActivationsLinear(EightBits):
    """W8A8: a scale an output and a scale a token, found when it comes; sums are exact in int32
    (arXiv 2211.10438).
    """

    def product(self, x: Tensor) -> Tensor:
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


class Int4Linear(QuantisedLinear):
    """Four bits, a scale and a zero a group of inputs: w = (code - zero) · scale (AWQ, arXiv
    2306.00978).

    `order [K]` says which input stands at each place where groups were made of inputs by importance
    (GPTQ's act-order).
    On a CPU the codes lie as torch's own int4 product wants them, where it takes the shape; else as
    `int4_matmul` does.
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
            qweight, scales = packed(codes_KN), scales_GN.contiguous()
        self.register_buffer("qweight", qweight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros_GN.to(torch.uint8).contiguous())

    def product(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        if not self._by_torch:
            return int4_matmul(x, self.qweight, self.scales, self.zeros, self.group)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        out = torch._weight_int4pack_mm_for_cpu(rows, self.qweight, self.group, self.scales)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def codes(self) -> Tensor:
        """`[K, N]` uint8, in the order of places."""
        if not self._by_torch:
            return unpack(self.qweight, self.in_features)
        # torch's packing is its own affair: a product with ones at one input, no scales, reads it
        # back exactly
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
        scale = (self.scales[..., 0] if self._by_torch else self.scales).float()
        spread = (
            x.repeat_interleave(self.group, 0)[: self.in_features]
            for x in (scale, self.zeros.float())
        )
        scale, zero = spread
        whole = ((self.codes().float() - zero) * scale).T
        if self.order is not None:
            whole = whole[:, self.order.argsort()]
        return whole.to(self.dtype)


class Fp8Linear(QuantisedLinear):
    """e4m3 with a scale a tile of 128 x 128, activations likewise a row of 128 (DeepSeek-V3,
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
        return fp8_matmul(*quantize_1x128(x), self.codes, self.scales, out_dtype=x.dtype)

    @property
    def weight(self) -> Tensor:
        whole = self.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (self.codes.float() * whole[: self.out_features, : self.in_features]).to(self.dtype)


def fits_torch(device: torch.device, inputs: int, outputs: int, group: int) -> bool:
    """Whether torch's int4 product for CPUs takes the shape (torch 2.13: groups of 32 to 256,
    outputs by 16).
    """
    whole = inputs % group == 0 and outputs % 16 == 0 and group in (32, 64, 128, 256)
    return device.type == "cpu" and whole


def packed_as(kind: str, weight: Tensor, group: int = GROUP) -> Packed:
    """The parts of `rounded`, before a layer is made of them. Raises ValueError."""
    if kind in ("int8", "w8a8"):
        return Packed(kind, *quantize_int8(weight))
    if kind == "fp8":
        return Packed(kind, *quantize_128x128(weight))
    if kind == "int4":
        return Packed(kind, *round_groups(weight, group), group)
    raise ValueError(f"{kind!r} is no way to keep a weight; there are int8, w8a8, int4 and fp8")


def rounded(
    weight: Tensor, kind: str, *, bias: Tensor | None = None, group: int = GROUP
) -> QuantisedLinear:
    """The layer of `weight [N, K]` by rounding to the nearest: kind is int8, w8a8, int4 or fp8.

    Raises ValueError.
    """
    return layer_of(packed_as(kind, weight, group), bias, weight.dtype, weight.device)


def layer_of(
    packed: Packed, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> QuantisedLinear:
    """A layer that computes with a weight in few bits as it is; scales are rounded to the run's
    precision.
    """
    codes, scales = packed.codes.to(device), packed.scales.to(device)
    if packed.kind == "int4":
        assert packed.zeros is not None
        order = None if packed.order is None else packed.order.to(device)
        # one group of all inputs may be of any size: it is a group of whole chunks that is not full
        whole = packed.group >= len(codes) and packed.group not in GROUPS
        group = -(-packed.group // 128) * 128 if whole else packed.group
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


class LowRankLinear(QuantisedLinear):
    """w = left · right, `[N, R]` and `[R, K]`: R · (N + K) numbers in place of N · K."""

    left: Tensor
    right: Tensor

    def __init__(self, left_NR: Tensor, right_RK: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(right_RK.shape[1], left_NR.shape[0], bias, left_NR.dtype)
        self.register_buffer("left", left_NR.contiguous())
        self.register_buffer("right", right_RK.contiguous())

    def product(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.right), self.left)

    @property
    def weight(self) -> Tensor:
        return self.left @ self.right


def round_groups(
    weight: Tensor, group: int, *, levels: int = 16, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """codes `[K, N]` uint8, scales and zeros `[G, N]`: each group's own range, 0 included, spread
    over the levels.

    Scales are of `dtype`, by default the weight's, and codes made with them as they are then.
    Raises ValueError for a
    weight that is not finite.
    """
    n, k = weight.shape
    if not bool(weight.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity, which no four bits mean")
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
