"""GPU cases of linear cross-entropy: ragged sizes against fp64; time and memory for a large
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.cross_entropy import linear_cross_entropy
from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare


def results(
    backend: str | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    upstream: float = 1.0,
    **options: Any,
) -> list[Tensor]:
    """Loss and the gradients of h and w, computed in `dtype`."""
    h, w, targets = inputs
    h, w = (x.detach().to(dtype).requires_grad_() for x in (h, w))
    loss = linear_cross_entropy(h, w, targets, backend=backend, **options)
    weights = (
        torch.linspace(0.5, 2.0, loss.numel(), device=h.device, dtype=loss.dtype).view(loss.shape)
        * upstream
    )
    dh, dw = torch.autograd.grad(loss, (h, w), weights)
    return [loss.detach(), dh, dw]


def _check(
    count: int, hidden: int, columns: int, dtype: torch.dtype, **options: Any
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        h = torch.randn(count, hidden, device=device).to(dtype)
        w = (torch.randn(columns, hidden, device=device) * hidden**-0.5).to(dtype)
        targets = torch.randint(0, columns, (count,), device=device)
        targets[::5] = -100
        inputs = (h, w, targets)
        comparisons = []
        for reduction in ("mean", "none"):
            more = options | {"reduction": reduction}
            ours = results("own", inputs, dtype, **more)
            exact = results(
                "reference",
                inputs,
                torch.float64,
                **{k: v for k, v in more.items() if k != "chunk"},
            )
            plain = results("torch", inputs, dtype, **more)
            names = [f"{reduction} {x}" for x in ("loss", "dh", "dw")]
            comparisons += [
                compare(*four, floor=1e-2) for four in zip(names, ours, exact, plain, strict=True)
            ]
        return comparisons

    return run


def _bench(count: int, hidden: int, columns: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        h = torch.randn(count, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = (
            torch.randn(columns, hidden, device=device, dtype=torch.bfloat16) * 0.02
        ).requires_grad_()
        targets = torch.randint(0, columns, (count,), device=device)

        def trained(call: Callable[[], Tensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(call(), (h, w))

        def full_logits() -> Callable[[], object]:
            return trained(lambda: torch.nn.functional.cross_entropy(h @ w.t(), targets))

        def liger() -> Callable[[], object]:
            from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
                LigerFusedLinearCrossEntropyFunction as Liger,
            )

            def call() -> Tensor:
                comparisons: Any = Liger.apply(h, w, targets)
                loss: Tensor = comparisons[0] if isinstance(comparisons, tuple) else comparisons
                return loss

            return trained(call)

        def cut_cross_entropy_peer() -> Callable[[], object]:
            from cut_cross_entropy import linear_cross_entropy as cce  # type: ignore[import-not-found]

            return trained(lambda: cce(h, w, targets))

        return Work(
            ours=trained(lambda: linear_cross_entropy(h, w, targets, check=False, backend="own")),
            peers={
                "torch, whole logits": full_logits,
                "liger": liger,
                "cut-cross-entropy": cut_cross_entropy_peer,
            },
            bytes=2 * 2 * (h.numel() + w.numel()),
            flops=6 * count * hidden * columns,
            bound="tensor",
        )

    return make


def _memory(device: torch.device) -> list[Compared]:
    """Extra memory at 8192 x 4096 x 131072, beyond arguments and gradients: at most 0.6 GiB."""
    h = torch.randn(8192, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(131072, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 131072, (8192,), device=device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    linear_cross_entropy(h, w, targets, check=False, backend="own").backward()  # type: ignore[no-untyped-call]
    extra = torch.cuda.max_memory_allocated(device) - before - 2 * (h.numel() + w.numel())
    return [Compared("extra GiB", extra / 2**30, 0.6)]


CASES: Cases = [
    Check("linear_cross_entropy", "bf16", _check(300, 256, 5003, torch.bfloat16, chunk=128)),
    Check(
        "linear_cross_entropy", "bf16 softcap", _check(300, 256, 32000, torch.bfloat16, softcap=5.0)
    ),
    Check("linear_cross_entropy", "fp16", _check(100, 128, 1000, torch.float16)),
    Check("linear_cross_entropy", "fp32", _check(100, 128, 1000, torch.float32, chunk=64)),
    Check("linear_cross_entropy", "memory", _memory),
    Bench(
        "linear_cross_entropy",
        "8192 x 4096 x 131072 forward + backward",
        _bench(8192, 4096, 131072),
        goal="linear-cross-entropy",
        rank=1,
    ),
    Bench(
        "linear_cross_entropy",
        "8192 x 2048 x 32000 forward + backward",
        _bench(8192, 2048, 32000),
        rank=4,
    ),
]
