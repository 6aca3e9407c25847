"""GPU cases of eight-bit weights: ragged sizes against fp64; few rows against bf16 cuBLAS."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.int8 import int8_matmul, quantize_int8


def _check(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        x = torch.randn(m, k, device=device).to(dtype)
        q, scales = quantize_int8(torch.randn(n, k, device=device).to(dtype))
        exact = x.double() @ (q.double() * scales.double().unsqueeze(1)).T
        plain = int8_matmul(x, q, scales, backend="torch")
        return [
            compare(
                f"splits {s}",
                int8_matmul(x, q, scales, num_splits=s, backend="own"),
                exact,
                plain,
                floor=1e-3,
            )
            for s in (None, 1, 3)
        ]

    return run


def _bench(m: int, n: int, k: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        q, scales = quantize_int8(w)
        return Work(
            ours=lambda: int8_matmul(x, q, scales, backend="own"),
            peers={"bf16 cuBLAS": lambda: lambda: torch.nn.functional.linear(x, w)},
            bytes=n * k + 2 * n + 2 * m * (n + k),
            flops=2 * m * n * k,
            bound="hbm",
            reads=True,
        )

    return make


CASES: Cases = [
    *(
        Check("int8_matmul", f"{m} x {n} x {k} {dtype}", _check(m, n, k, dtype))
        for m, n, k in ((1, 320, 1000), (70, 200, 4096))
        for dtype in (torch.bfloat16, torch.float16)
    ),
    Bench("int8_matmul", "M1 N14336 K4096", _bench(1, 14336, 4096), rank=4),
    Bench("int8_matmul", "M16 N14336 K4096", _bench(16, 14336, 4096), rank=5),
]
