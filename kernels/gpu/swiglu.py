"""GPU cases of swiglu: ragged widths, FP8 output; against torch, torch.compile, Liger and separate
quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from kernels.gated_mlp import reference, swiglu
from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.gpu.comparison import nan_padded, values_and_gradients
from kernels.norm.reference import to_fp8


def _check(
    rows: int, width: int, dtype: torch.dtype, two: bool
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(width)
        wide = nan_padded(rows, 2 * width, device=device, dtype=dtype)
        inputs = list(wide.chunk(2, -1)) if two else [wide]

        def call(backend: str, inputs: list[torch.Tensor]) -> Any:
            return swiglu(inputs[0], up=inputs[1] if two else None, backend=backend)

        return values_and_gradients(
            ["y", "dgate", "dup"] if two else ["y", "dgate_up"], call, inputs
        )

    return run


def _check_quant(rows: int, width: int, quant: str) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(width)
        x = nan_padded(rows, 2 * width, device=device)
        exact = reference.swiglu(*x.double().chunk(2, -1))

        def spread(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (
                q.double()
                * scale.double().repeat_interleave(width if quant == "row" else 128, -1)[:, :width]
            )

        ours: Any = swiglu(x, quant, backend="own")
        plain: Any = swiglu(x, quant, backend="reference")
        return [
            compare("scale", ours[1], plain[1].double(), plain[1], floor=4e-6),
            compare("q · scale", spread(*ours), exact, spread(*plain), factor=1.01),
        ]

    return run


def _forward(rows: int, width: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        gate, up = torch.randn(2, rows, width, device=device, dtype=torch.bfloat16)

        def compiled() -> Callable[[], object]:
            fast = torch.compile(lambda gate, up: torch.nn.functional.silu(gate) * up)
            return lambda: fast(gate, up)

        def liger() -> Callable[[], object]:
            from liger_kernel.ops.swiglu import swiglu_forward  # type: ignore[import-not-found]

            return lambda: swiglu_forward(gate, up)

        return Work(
            ours=lambda: swiglu(gate, up=up, backend="own"),
            peers={
                "torch": lambda: lambda: torch.nn.functional.silu(gate) * up,
                "torch.compile": compiled,
                "liger": liger,
            },
            bytes=3 * gate.numel() * 2,
            flops=5 * gate.numel(),
            bound="hbm",
        )

    return make


def _backward(rows: int, width: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        gate, up = (
            torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        dy = torch.randn(rows, width, device=device, dtype=torch.bfloat16)

        def run_backward(y: Any) -> Callable[[], object]:
            return lambda: torch.autograd.grad(y, (gate, up), dy, retain_graph=True)

        return Work(
            ours=run_backward(swiglu(gate, up=up, backend="own")),
            peers={  # Liger writes gradients over its inputs, so it cannot be called twice
                "torch": lambda: run_backward(torch.nn.functional.silu(gate) * up),
                "torch.compile": lambda: run_backward(
                    torch.compile(lambda g, u: torch.nn.functional.silu(g) * u)(gate, up)
                ),
            },
            bytes=5 * gate.numel() * 2,
            flops=10 * gate.numel(),
            bound="hbm",
        )

    return make


def _check_both(rows: int, width: int) -> Callable[[torch.device], list[Compared]]:
    """The product and its codes from one launch, and its gradients; the codes are of the stored
    product.
    """

    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(width)
        gate, up = (
            torch.randn(rows, width, device=device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(2)
        )
        y, q, scale = cast(
            tuple[torch.Tensor, ...], swiglu(gate, "1x128", up=up, keep=True, backend="own")
        )
        grads = torch.autograd.grad(y.sum(), (gate, up))
        product_only = cast(torch.Tensor, swiglu(gate, up=up, backend="own"))
        expected = torch.autograd.grad(product_only.sum(), (gate, up))
        codes, scales = to_fp8(y.detach(), "1x128")
        steps = (q.view(torch.uint8).int() - codes.view(torch.uint8).int()).abs()
        pairs = [
            ("y", y, product_only),
            ("dgate", grads[0], expected[0]),
            ("dup", grads[1], expected[1]),
            ("scale", scale, scales),
        ]
        comparisons = [compare(name, ours, theirs.double(), theirs) for name, ours, theirs in pairs]
        return [
            *comparisons,
            Compared("codes that differ", (steps > 0).float().mean().item(), 1e-3),
        ]

    return run


def _quantized(rows: int, width: int) -> Callable[[torch.device], Work]:
    """1x128 in one call, against our swiglu with a compiled quantization after it, and both
    compiled together.
    """

    def make(device: torch.device) -> Work:
        gate, up = torch.randn(2, rows, width, device=device, dtype=torch.bfloat16)

        def separate() -> Callable[[], object]:
            quantize = torch.compile(lambda y: to_fp8(y, "1x128"))

            def both() -> object:
                return quantize(swiglu(gate, up=up, backend="own"))

            return both

        def compiled() -> Callable[[], object]:
            fast = torch.compile(lambda gate, up: to_fp8(reference.swiglu(gate, up), "1x128"))
            return lambda: fast(gate, up)

        return Work(
            ours=lambda: swiglu(gate, "1x128", up=up, backend="own"),
            peers={"separate calls": separate, "torch.compile": compiled},
            bytes=gate.numel() * (2 + 2 + 1) + gate.numel() // 128 * 4,
            flops=8 * gate.numel(),
            bound="hbm",
        )

    return make


CASES: Cases = [
    *(
        Check(
            "swiglu",
            f"{rows}x{width} {str(dtype)[6:]}{' two' * two}",
            _check(rows, width, dtype, two),
        )
        for rows, width, dtype, two in [
            (70000, 24, torch.float16, False),
            (37, 1001, torch.float32, True),
            (257, 14336, torch.bfloat16, True),
        ]
    ),
    *(
        Check("swiglu", f"{rows}x{width} {quant}", _check_quant(rows, width, quant))
        for rows, width, quant in [(77, 14336, "1x128"), (50, 4100, "row"), (9, 4100, "1x128")]
    ),
    Check("swiglu", "77x14336 and 1x128", _check_both(77, 14336)),
    Bench("swiglu", "forward 8192x14336", _forward(8192, 14336), "swiglu", 2),
    Bench("swiglu", "backward 8192x14336", _backward(8192, 14336)),
    Bench("swiglu", "1x128, 8192x14336", _quantized(8192, 14336), "swiglu-quant", 3),
]
