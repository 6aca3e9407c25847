"""Quantization of weights to four bits, and their packed layout: eight per int32, for products of
16 columns.

Of every 128 numbers along K, int32 row j holds in its nibble i the number 16 · i + j, so that one
shift and mask of a tile `[16, N]` gives 16 consecutive rows of the weight, as tensor cores require.
Shapes: N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import checks

CHUNK = 128
ROWS = 16
# nibble i of AutoAWQ's int32 holds output _AWQ_ORDER[i] of its eight
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(
    w: Tensor, group: int = 128, *, scales: Tensor | None = None, zeros: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A linear layer's weight `[N, K]` as qweight, scales and zeros for `int4_matmul`: w ~ (code -
    zero) · scale.

    qweight `[ceil(K / 128) · 16, N]` int32; scales `[G, N]` in w's dtype and zeros `[G, N]` uint8,
    0 to 15, for groups of `group` (16, 32, 64 or a multiple of 128) numbers along K; the last may
    be smaller. Without `scales` and `zeros` each group's own range, including 0, maps to 0 to 15; a
    search such as AWQ's provides them. Raises ValueError or TypeError.
    """
    checks.dtype_in("w", w)
    checks.dims("w", w, 2)
    check_group(group)
    (n, k), count = w.shape, -(-w.shape[1] // group)
    if (scales is None) != (zeros is None):
        raise ValueError("pass scales and zeros together, or neither.")
    if k == 0:
        raise ValueError("w has no inputs to pack.")
    wide = functional.pad(w.float(), (0, count * group - k)).view(n, count, group)
    if scales is None or zeros is None:
        low, high = wide.amin(2).clamp_max(0), wide.amax(2).clamp_min(0)
        minimum = torch.finfo(w.dtype).tiny  # a group of zeros needs a nonzero scale
        scales = ((high - low) / 15).clamp_min(minimum).to(w.dtype).T.contiguous()
        zeros = (-low / scales.T.float()).round().clamp(0, 15).T.to(torch.uint8).contiguous()
    else:
        checks.dtype_in("scales", scales)
        checks.shape("scales", scales, (count, n), "groups, outputs")
        checks.shape("zeros", zeros, (count, n), "groups, outputs")
        checks.dtype_in("zeros", zeros, (torch.uint8,))
        checks.same_device(w=w, scales=scales, zeros=zeros)
        if not bool(((scales != 0) & scales.isfinite()).all()):
            raise ValueError(
                "scales contain zero, NaN or infinity; they must be finite and nonzero."
            )
        if bool((zeros > 15).any()):
            raise ValueError(
                f"zeros contain {int(zeros.max())}; they must be in 0 to 15, the range of four "
                "bits."
            )
    if not bool(wide.isfinite().all()):
        raise ValueError("w contains NaN or infinity, which four bits cannot represent.")
    codes = (wide / scales.T.float().unsqueeze(2)).round() + zeros.T.unsqueeze(2)
    codes = codes.clamp(0, 15).to(torch.uint8).view(n, -1)[:, :k]
    return pack_codes(codes.T), scales, zeros


def pack_codes(codes_KN: Tensor) -> Tensor:
    """Codes 0 to 15 `[K, N]` as `[ceil(K / 128) · 16, N]` int32; K is padded with zeros."""
    padded = functional.pad(codes_KN, (0, 0, 0, -codes_KN.shape[0] % CHUNK)).to(torch.int32)
    nibbles = padded.view(-1, 8, ROWS, codes_KN.shape[1])
    shifts = torch.arange(0, 32, 4, device=codes_KN.device, dtype=torch.int32).view(1, 8, 1, 1)
    # nibbles do not overlap: the sum equals their or
    return (nibbles << shifts).sum(1, dtype=torch.int32).flatten(0, 1)


def unpack(qweight: Tensor, k: int) -> Tensor:
    """Codes `[K, N]` uint8 of a packed weight."""
    shifts = torch.arange(0, 32, 4, device=qweight.device, dtype=torch.int32).view(1, 8, 1, 1)
    nibbles = (qweight.view(-1, 1, ROWS, qweight.shape[1]) >> shifts) & 15
    return nibbles.to(torch.uint8).reshape(-1, qweight.shape[1])[:k]


def dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, k: int, kind: torch.dtype
) -> Tensor:
    """The weight `[K, N]`: (code - zero) · scale in `kind`."""
    spread = (x.to(kind).repeat_interleave(group, 0)[:k] for x in (scales, zeros))
    scale, zero = spread
    return (unpack(qweight, k).to(kind) - zero) * scale


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converts AutoAWQ's "gemm" tensors: qweight `[K, N / 8]`, qzeros `[G, N / 8]`, scales `[G,
    N]`.
    """
    for name, x in (("qweight", qweight), ("qzeros", qzeros)):
        checks.dtype_in(name, x, (torch.int32,))
        checks.shape(name, x, (None, scales.shape[1] // 8), "rows, outputs / 8")
    order = torch.tensor(_AWQ_ORDER, device=qweight.device)
    output_order = order.argsort()
    codes, zeros = (_nibbles(x)[..., output_order].flatten(1) for x in (qweight, qzeros))
    return pack_codes(codes), scales.contiguous(), zeros.contiguous()


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converts GPTQ's tensors (format v1, no act-order): qweight `[K / 8, N]`, qzeros `[G, N / 8]`
    containing zero - 1, scales `[G, N]`.

    Raises ValueError for a zero of 16, which four bits cannot represent.
    """
    checks.dtype_in("qweight", qweight, (torch.int32,))
    checks.shape("qweight", qweight, (None, scales.shape[1]), "inputs / 8, outputs")
    checks.shape("qzeros", qzeros, (scales.shape[0], scales.shape[1] // 8), "groups, outputs / 8")
    codes = _nibbles(qweight).transpose(1, 2).flatten(0, 1)
    zeros = _nibbles(qzeros).flatten(1) + 1
    if bool((zeros > 15).any()):
        raise ValueError(
            "qzeros contain a zero of 16, which four bits cannot represent; quantize the weight "
            "again."
        )
    return pack_codes(codes), scales.contiguous(), zeros.contiguous()


def check_group(group: int) -> None:
    """Raises ValueError for a group that is not a whole number of tiles of 16 in a chunk, or of
    chunks.
    """
    checks.integer("group", group)
    if group not in (16, 32, 64) and (group < CHUNK or group % CHUNK):
        raise ValueError(f"group is {group}; it must be 16, 32, 64 or a multiple of 128.")


def _nibbles(x: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
    return ((x.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
