"""GPU cases of layer_norm: ragged and wide rows; against torch, torch.compile and Liger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work
from kernels.gpu.comparison import nan_padded, values_and_gradients
from kernels.norm import layer_norm, reference

EPS = 1e-5


def _check(
    rows: int, n: int, dtype: torch.dtype, bias: bool
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(n)
        # a nonzero mean, to test cancellation
        x = nan_padded(rows, n, device=device, dtype=dtype) * 0.5 + 3
        inputs = [x, *torch.randn(1 + bias, n, device=device, dtype=dtype)]

        def call(backend: str, inputs: list[torch.Tensor]) -> torch.Tensor:
            return layer_norm(
                inputs[0], inputs[1], inputs[2] if bias else None, EPS, backend=backend
            )

        return values_and_gradients(["y", "dx", "dw", "db"][: 3 + bias], call, inputs)

    return run


def _forward(rows: int, n: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        w, b = torch.randn(2, n, device=device, dtype=torch.bfloat16)

        def compiled() -> Callable[[], object]:
            fast = torch.compile(lambda x, w, b: reference.layer_norm(x, w, b, EPS).to(x.dtype))
            return lambda: fast(x, w, b)

        return Work(
            ours=lambda: layer_norm(x, w, b, EPS, backend="own"),
            peers={
                "torch": lambda: lambda: torch.nn.functional.layer_norm(x, (n,), w, b, EPS),
                "torch.compile": compiled,
            },
            bytes=2 * x.numel() * 2 + 2 * n * 2,
            flops=7 * x.numel(),
            bound="hbm",
        )

    return make


def _backward(rows: int, n: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16, requires_grad=True)
        w, b = (
            torch.randn(n, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        dy = torch.randn(rows, n, device=device, dtype=torch.bfloat16)

        def run_backward(y: Any) -> Callable[[], object]:
            return lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)

        def liger() -> Callable[[], object]:
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found]

            return run_backward(LigerLayerNormFunction.apply(x, w, b, EPS))

        return Work(
            ours=run_backward(layer_norm(x, w, b, EPS, backend="own")),
            peers={
                "torch": lambda: run_backward(torch.nn.functional.layer_norm(x, (n,), w, b, EPS)),
                "torch.compile": lambda: run_backward(
                    torch.compile(lambda x, w, b: reference.layer_norm(x, w, b, EPS).to(x.dtype))(
                        x, w, b
                    )
                ),
                "liger": liger,
            },
            bytes=3 * x.numel() * 2 + 4 * n * 2,
            flops=12 * x.numel(),
            bound="hbm",
        )

    return make


CASES: Cases = [
    *(
        Check(
            "layer_norm",
            f"{rows}x{n} {str(dtype)[6:]}{' bias' * bias}",
            _check(rows, n, dtype, bias),
        )
        for rows, n, dtype, bias in [
            (37, 100, torch.float32, True),
            (513, 1600, torch.bfloat16, True),
            (64, 8192, torch.float16, False),
            (19, 40001, torch.bfloat16, True),
        ]
    ),
    Bench("layer_norm", "forward 16384x4096", _forward(16384, 4096), rank=7),
    Bench("layer_norm", "backward 16384x4096", _backward(16384, 4096), rank=7),
]
