"""e4m3 values with one fp32 scale per tile (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

Does not depend on products or layers. Sizes need not be multiples of 128: the last tile of a row, a
column or both is smaller.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import runtime
from kernels.dispatch import Candidate, cache_choice, cached_choice, choose

SIDE = 128
ROW, COLUMN, BLOCK = (1, SIDE), (SIDE, 1), (SIDE, SIDE)
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
# scales stay normal fp32 numbers, and tiles of zeros have one
_SMALLEST = LARGEST * torch.finfo(torch.float32).tiny
_OPS = {ROW: "quantize_1x128", COLUMN: "quantize_128x1", BLOCK: "quantize_128x128"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix `[R, C]`: e4m3 `codes` `[R, C]` times fp32 `scales` `[R / tile[0], C / tile[1]]`.

    The shape of `scales` is rounded up.
    """

    codes: Tensor
    scales: Tensor
    tile: tuple[int, int]

    def transposed(self) -> Tiles:
        """The same numbers as `[C, R]`, codes contiguous."""
        codes = self.codes.view(torch.uint8).t().contiguous().view(E4M3)
        return Tiles(codes, self.scales.t(), (self.tile[1], self.tile[0]))

    def decoded(self) -> Tensor:
        """`[R, C]` in fp32: codes times their scales, rounded to 24 bits."""
        rows, columns = self.codes.shape
        wide = _tiled(_values(self.codes), self.tile) * self.scales[:, None, :, None]
        return wide.flatten(2).flatten(0, 1)[:rows, :columns]


def quantize(matrix: Tensor, tile: tuple[int, int]) -> Tiles:
    """Scale each tile so that its largest magnitude becomes 448, and round to e4m3, ties to even.

    `s = max |x| / 448`, `code = e4m3(x / s)`, both in fp32. A tile with a non-finite number decodes
    to NaN. Uses one launch of `kernels` if available.
    """
    if not _uses_torch(matrix, tile):
        from kernels import fp8

        codes, scales = getattr(fp8, _OPS[tile])(matrix)
        return Tiles(codes, scales, tile)
    rows, columns = matrix.shape
    tiled = _tiled(matrix.float(), tile)
    scales = tiled.abs().amax((1, 3)).clamp_(min=_SMALLEST).div_(LARGEST)
    codes = (tiled / scales[:, None, :, None]).to(E4M3).flatten(2).flatten(0, 1)
    # copied, so that a small matrix does not keep its padded tile alive
    if codes.shape != matrix.shape:
        codes = codes[:rows, :columns].clone(memory_format=torch.contiguous_format)
    return Tiles(codes, scales, tile)


def why_no_kernel(x: Tensor) -> str | None:
    """Why no e4m3 kernel runs on this tensor; None if one does."""
    if torch.compiler.is_compiling():
        return "torch.compile generates its own kernels"
    arch = runtime.arch(x.device)
    return runtime.why_not(x) or (None if runtime.has_fp8(arch) else f"no e4m3 on {arch}")


def _uses_torch(matrix: Tensor, tile: tuple[int, int]) -> bool:
    """Whether the torch formula is used; decided and recorded once per kind of matrix."""
    kind = ("fp8 tiles", tile, matrix.dtype, matrix.device)
    if cached_choice(kind):
        return True
    why = why_no_kernel(matrix)
    if why is None or os.environ.get("KERNELS_BACKEND"):
        return False
    choose(_OPS[tile], {"dtype": matrix.dtype}, [Candidate("own", why), Candidate("torch")])
    cache_choice(kind, True)
    return True


def _tiled(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
    """`[R / tile[0], tile[0], C / tile[1], tile[1]]`, zero padded."""
    rows, columns = matrix.shape
    padding = (-rows % tile[0], -columns % tile[1])
    if any(padding):
        matrix = functional.pad(matrix, (0, padding[1], 0, padding[0]))
    return matrix.reshape(-1, tile[0], matrix.shape[1] // tile[1], tile[1])


def _values(codes: Tensor) -> Tensor:
    """e4m3 → fp32 except NaN, which the scales carry.

    torch's cast is elementwise on a CPU: 2.4 ms for 2048 x 384, against 0.2 ms here. Moving sign,
    exponent and mantissa to fp16's bits gives the value times 2^-8, also for subnormals.
    """
    if codes.device.type != "cpu":
        return codes.float()
    shifted = codes.view(torch.int8).to(torch.int16)
    shifted = shifted.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
    return shifted.view(torch.float16).float().mul_(256)
