"""GPU cases of block-scaled fp8: quantization and products against fp64; few and many rows against
cuBLASLt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.fp8 import (
    fp8_matmul,
    quantize_1x128,
    quantize_128x1,
    quantize_128x128,
    reference,
    torch_scaled_mm,
)
from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare


def quantized_operands(
    m: int, n: int, k: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random operands whose tiles differ in magnitude by orders of ten."""
    a = torch.randn(m, k, device=device) * torch.logspace(-2, 2, m, device=device).unsqueeze(1)
    b = torch.randn(n, k, device=device) * torch.logspace(-1, 1, k, device=device)
    return (*quantize_1x128(a, backend="reference"), *quantize_128x128(b, backend="reference"))


def _check(m: int, n: int, k: int, backend: str) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        a, sa, b, sb = quantized_operands(m, n, k, device)
        exact = reference.fp8_matmul(a, sa, b, sb, torch.float64)
        plain = reference.fp8_matmul(a, sa, b, sb)
        # tensor cores keep 14 bits of a sum of e4m3 products (DeepSeek-V3, section 3.5.2), here of
        # 128 products
        return [
            compare(
                "out",
                fp8_matmul(a, sa, b, sb, torch.float32, backend=backend),
                exact,
                plain,
                floor=2e-3,
            )
        ]

    return run


def _check_quantize(rows: int, k: int) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        x[1] = 0.0
        comparisons = []
        for quantize, height, width in (
            (quantize_1x128, 1, 128),
            (quantize_128x128, 128, 128),
            (quantize_128x1, 128, 1),
        ):
            name = f"{height}x{width}"
            (q, scale), (q_plain, scale_plain) = (
                quantize(x, backend="own"),
                quantize(x, backend="reference"),
            )
            comparisons.append(compare(f"{name} scale", scale, scale_plain.double(), scale_plain))
            pairs = ((q, scale), (q_plain, scale_plain))
            decoded, plain = (reference.dequantize(*pair, height, columns=width) for pair in pairs)
            comparisons.append(
                compare(f"{name} q · scale", decoded, x.double(), plain, factor=1.01)
            )
        return comparisons

    return run


def _bench(m: int, n: int, k: int, ours: str | None) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        a, sa, b, sb = quantized_operands(m, n, k, device)

        def cublas() -> Callable[[], object]:
            reason = torch_scaled_mm.why_not(device)
            if reason is not None:
                raise RuntimeError(reason)
            kinds = torch.nn.functional.ScalingType
            x, x_scales, y, y_scales = torch_scaled_mm.operands(a, sa, b, sb)
            return lambda: torch.nn.functional.scaled_mm(
                x,
                y,
                x_scales,
                kinds.BlockWise1x128,
                y_scales,
                kinds.BlockWise128x128,
                output_dtype=torch.bfloat16,
            )

        return Work(
            ours=lambda: fp8_matmul(a, sa, b, sb, backend=ours),
            peers={"cuBLASLt blockwise": cublas},
            bytes=m * k + n * k + 2 * m * n,
            flops=2 * m * n * k,
            bound="hbm" if m <= 64 else "fp8",
            reads=m <= 64,
        )

    return make


_OWN = ((1, 320, 1000), (33, 200, 4096), (300, 500, 130))

CASES: Cases = [
    *(Check("fp8_matmul", f"own {m} x {n} x {k}", _check(m, n, k, "own")) for m, n, k in _OWN),
    Check("fp8_matmul", "scaled_mm 130 x 200 x 640", _check(130, 200, 640, "torch")),
    Check("quantize_1x128", "ragged", _check_quantize(300, 1000)),
    Bench("fp8_matmul", "M16 N7168 K4096", _bench(16, 7168, 4096, "own"), goal="fp8-small", rank=2),
    Bench("fp8_matmul", "M64 N7168 K4096", _bench(64, 7168, 4096, "own"), goal="fp8-small", rank=3),
    *(
        Bench(
            "fp8_matmul",
            f"M{m} N7168 K4096 as called",
            _bench(m, 7168, 4096, None),
            "fp8-large",
            4,
            "dispatched",
        )
        for m in (1024, 4096)
    ),
]
