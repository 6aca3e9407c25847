"""GPU cases of rms_norm: model and ragged shapes; against Liger, torch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.gpu.comparison import nan_padded, values_and_gradients
from kernels.norm import reference, rms_norm

EPS = 1e-6


def _check(
    rows: int, n: int, dtype: torch.dtype, residual: bool
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(n)
        inputs = [
            nan_padded(rows, n, device=device, dtype=dtype),
            torch.randn(n, device=device, dtype=dtype),
        ]
        if residual:
            inputs.append(nan_padded(rows, n, device=device, dtype=dtype, gap=5))

        def call(backend: str, inputs: list[torch.Tensor]) -> Any:
            return rms_norm(
                inputs[0], inputs[1], EPS, inputs[2] if residual else None, backend=backend
            )

        names = ["y", "h"][: 1 + residual] + ["dx", "dw", "dresidual"][: len(inputs)]
        return values_and_gradients(names, call, inputs)

    return run


def _check_quant(rows: int, n: int, quant: str) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(n)
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, device=device, dtype=torch.bfloat16)
        exact = reference.rms_norm(x.double(), w.double(), EPS)

        def spread(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            width = n if quant == "row" else 128
            return q.double() * scale.double().repeat_interleave(width, -1)[:, :n]

        ours: Any = rms_norm(x, w, EPS, quant=quant, backend="own")
        plain: Any = rms_norm(x, w, EPS, quant=quant, backend="reference")
        return [
            compare("scale", ours[1], plain[1].double(), plain[1], floor=4e-6),
            compare("q · scale", spread(*ours), exact, spread(*plain), factor=1.01),
        ]

    return run


def _check_both(rows: int, n: int) -> Callable[[torch.device], list[Compared]]:
    """The norm and its codes from one launch, and its gradients; the codes are of the stored
    norm.
    """

    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(n)
        x, w = (
            torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()
            for shape in ((rows, n), (n,))
        )
        y, q, scale = cast(
            tuple[torch.Tensor, ...], rms_norm(x, w, EPS, quant="1x128", keep=True, backend="own")
        )
        grads = torch.autograd.grad(y.sum(), (x, w))
        norm_only: Any = rms_norm(x, w, EPS, backend="own")
        expected = torch.autograd.grad(norm_only.sum(), (x, w))
        codes, scales = reference.to_fp8(y.detach(), "1x128")
        steps = (q.view(torch.uint8).int() - codes.view(torch.uint8).int()).abs()
        pairs = [
            ("y", y, norm_only),
            ("dx", grads[0], expected[0]),
            ("dw", grads[1], expected[1]),
            ("scale", scale, scales),
        ]
        comparisons = [compare(name, ours, theirs.double(), theirs) for name, ours, theirs in pairs]
        return [
            *comparisons,
            Compared("codes that differ", (steps > 0).float().mean().item(), 1e-3),
        ]

    return run


def _forward(rows: int, n: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, device=device, dtype=torch.bfloat16)

        def liger() -> Callable[[], object]:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

            return lambda: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)

        return Work(
            ours=lambda: rms_norm(x, w, EPS, backend="own"),
            peers={
                "torch": lambda: lambda: torch.nn.functional.rms_norm(x, (n,), w, EPS),
                "torch.compile": lambda: _compiled(
                    lambda: reference.rms_norm(x, w, EPS).to(x.dtype)
                ),
                "liger": liger,
            },
            bytes=2 * x.numel() * 2 + n * 2,
            flops=4 * x.numel(),
            bound="hbm",
        )

    return make


def _backward(rows: int, n: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(n, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(rows, n, device=device, dtype=torch.bfloat16)

        def run_backward(y: Any) -> Callable[[], object]:
            return lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)

        def compiled() -> Callable[[], object]:
            return run_backward(
                torch.compile(lambda a, b: reference.rms_norm(a, b, EPS).to(a.dtype))(x, w)
            )

        def liger() -> Callable[[], object]:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return run_backward(LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False))

        return Work(
            ours=run_backward(rms_norm(x, w, EPS, backend="own")),
            peers={
                "torch": lambda: run_backward(torch.nn.functional.rms_norm(x, (n,), w, EPS)),
                "torch.compile": compiled,
                "liger": liger,
            },
            bytes=3 * x.numel() * 2 + 2 * n * 2,
            flops=10 * x.numel(),
            bound="hbm",
        )

    return make


def _fused(rows: int, n: int) -> Callable[[torch.device], Work]:
    """Residual addition and quantization in one call, against torch.compile of the same."""

    def make(device: torch.device) -> Work:
        x, r = torch.randn(2, rows, n, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, device=device, dtype=torch.bfloat16)

        def plain(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = x + r
            return (*reference.to_fp8(reference.rms_norm(h, w, EPS), "1x128"), h)

        def compiled() -> Callable[[], object]:
            fast = torch.compile(plain)
            return lambda: fast(x, w, r)

        return Work(
            ours=lambda: rms_norm(x, w, EPS, r, "1x128", backend="own"),
            peers={"torch.compile": compiled},
            bytes=rows * n * (2 + 2 + 2 + 1) + rows * n // 128 * 4,
            flops=6 * x.numel(),
            bound="hbm",
        )

    return make


def _compiled(function: Callable[[], torch.Tensor]) -> Callable[[], object]:
    fast = torch.compile(function)
    return lambda: fast()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES: Cases = [
    *(
        Check(
            "rms_norm", f"{rows}x{n} {str(dtype)[6:]}{' residual' * r}", _check(rows, n, dtype, r)
        )
        for rows, n, dtype, r in [
            (1000, 128, BF16, False),
            (37, 100, FP32, True),
            (513, 4096, BF16, True),
            (64, 5120, FP16, False),
            (300, 8192, BF16, True),
            (19, 16384, BF16, False),
            (33, 65537, BF16, True),
        ]
    ),
    *(
        Check("rms_norm", f"{rows}x{n} {quant}", _check_quant(rows, n, quant))
        for rows, n, quant in [
            (77, 4096, "1x128"),
            (50, 4100, "row"),
            (9, 40000, "1x128"),
            (9, 40000, "row"),
        ]
    ),
    *(
        Check("rms_norm", f"{rows}x{n} and 1x128", _check_both(rows, n))
        for rows, n in [(77, 4096), (9, 40000)]
    ),
    Bench("rms_norm", "forward 16384x4096", _forward(16384, 4096), "rms-norm-forward", 1),
    Bench("rms_norm", "forward 8192x8192", _forward(8192, 8192)),
    Bench("rms_norm", "forward 2048x65536", _forward(2048, 65536)),
    Bench("rms_norm", "backward 16384x4096", _backward(16384, 4096), "rms-norm-backward", 1),
    Bench("rms_norm", "backward 8192x8192", _backward(8192, 8192)),
    Bench("rms_norm", "backward 2048x65536", _backward(2048, 65536)),
    Bench("rms_norm", "residual and 1x128, 16384x4096", _fused(16384, 4096)),
]
