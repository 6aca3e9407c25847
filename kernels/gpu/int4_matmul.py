"""GPU cases of four-bit weights: groups, ragged sizes and both half types against fp64; against
bf16 cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.int4 import int4_matmul, pack_awq
from kernels.int4.pack import dequantize


def _check(
    m: int, n: int, k: int, group: int, dtype: torch.dtype
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        x = torch.randn(m, k, device=device).to(dtype)
        packed = pack_awq((torch.randn(n, k, device=device) * k**-0.5).to(dtype), group)
        exact = x.double() @ dequantize(*packed, group, k, torch.float64)
        plain = x @ dequantize(*packed, group, k, torch.float32).to(dtype)
        comparisons = [
            compare(
                f"own, splits {s}",
                int4_matmul(x, *packed, group, num_splits=s, backend="own"),
                exact,
                plain,
                floor=1e-3,
            )
            for s in (None, 1, 3)
        ]
        return [
            *comparisons,
            compare(
                "decoded", int4_matmul(x, *packed, group, backend="torch"), exact, plain, floor=1e-3
            ),
        ]

    return run


def _bench(m: int, n: int, k: int, ours: str | None) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        packed = pack_awq(w, 128)
        return Work(
            ours=lambda: int4_matmul(x, *packed, 128, backend=ours),
            peers={"bf16 cuBLAS": lambda: lambda: torch.nn.functional.linear(x, w)},
            bytes=n * k // 2 + 3 * n * k // 128 + 2 * m * (n + k),
            flops=2 * m * n * k,
            bound="hbm" if m <= 64 else "tensor",
            reads=m <= 64,
        )

    return make


CASES: Cases = [
    *(
        Check("int4_matmul", f"{m} x {n} x {k} by {group} {dtype}", _check(m, n, k, group, dtype))
        for m, n, k, group in (
            (1, 320, 1000, 128),
            (17, 200, 4096, 64),
            (100, 96, 544, 32),
            (5, 130, 2048, 256),
        )
        for dtype in (torch.bfloat16, torch.float16)
    ),
    Bench("int4_matmul", "M1 N14336 K4096", _bench(1, 14336, 4096, "own"), goal="int4-1", rank=2),
    Bench(
        "int4_matmul", "M16 N14336 K4096", _bench(16, 14336, 4096, "own"), goal="int4-16", rank=2
    ),
    Bench(
        "int4_matmul",
        "M1024 N14336 K4096 as called",
        _bench(1024, 14336, 4096, None),
        rank=5,
        backend="torch",
    ),
]
