"""GPU cases of unscale_ and FusedAdamW: small 8B-like shapes for correctness, half a billion
numbers timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.gpu.comparison import FLOORS
from kernels.optim import FusedAdamW, unscale_

SHAPES = [(1000, 512), (512,), (33000,), (1,), (7, 11), (2, 16384), (0,)]


def _check_unscale(dtype: torch.dtype) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        scale = torch.tensor([1 / 3], device=device)
        comparisons = []
        for bad in (None, float("inf"), float("nan")):
            grads = [torch.randn(s, device=device, dtype=dtype) for s in SHAPES]
            grads.append(torch.randn(5001, device=device, dtype=dtype)[1:])  # not aligned
            if bad is not None:
                grads[2][32999] = bad
            exact = [g.double() * scale.double() for g in grads]
            plain = [g.clone() for g in grads]
            overflow = torch.zeros(2, 1, device=device).unbind()
            unscale_(grads, scale, overflow[0], backend="own")
            unscale_(plain, scale, overflow[1], backend="torch")
            comparisons.append(
                compare(f"found_inf with {bad}", overflow[0], overflow[1].double(), overflow[1])
            )
            comparisons += [
                compare(f"{tuple(g.shape)} with {bad}", g, e, p, floor=FLOORS[dtype])
                for g, e, p in zip(grads, exact, plain, strict=True)
            ]
        return comparisons

    return run


def _check_steps(dtype: torch.dtype, stochastic: bool) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        def trained(
            backend: str, dtype_: torch.dtype, stochastic: bool
        ) -> tuple[list[torch.Tensor], torch.Tensor]:
            generator = torch.Generator(device).manual_seed(1)
            params = [
                torch.randn(s, device=device, generator=generator).to(dtype_).requires_grad_()
                for s in SHAPES
            ]
            groups = [
                {"params": params[:3], "weight_decay": 0.0},
                {"params": params[3:], "lr": 0.02},
            ]
            optimizer = FusedAdamW(
                groups, lr=0.01, clip_norm=0.5, stochastic_rounding=stochastic, backend=backend
            )
            scale = torch.tensor([1 / 8], device=device)
            for step in range(6):
                for p in params:
                    p.grad = 8 * torch.randn(p.shape, device=device, generator=generator).to(dtype_)
                if step == 3:
                    params[0].grad[999, 511] = float("inf")  # type: ignore[index]
                optimizer.step(inv_scale=scale)
            assert optimizer.grad_norm is not None
            counts = torch.stack([optimizer.state[p]["step"] for p in params])
            return [*(p.detach() for p in params), counts], optimizer.grad_norm

        ours, norm = trained("own", dtype, stochastic)
        plain, plain_norm = trained("reference", dtype, stochastic)
        wide, wide_norm = trained("reference", torch.float32, False)
        names = [*(str(s) for s in SHAPES), "step counts"]
        some = zip(names, ours, wide, plain, strict=True)
        # six steps, each off by at most one unit in the last place of bf16
        floor = 0.05 if stochastic else max(1e-5, FLOORS[dtype])
        comparisons = [
            compare(n, got, want.double(), plain_value, floor=floor)
            for n, got, want, plain_value in some
        ]
        return [
            *comparisons,
            compare("norm", norm, wide_norm.double(), plain_norm, floor=FLOORS[dtype]),
        ]

    return run


def _step(sizes: list[tuple[int, int]], dtype: torch.dtype) -> Callable[[torch.device], Work]:
    """Scale, overflow, clip and step, against torch's fused step after separate passes for the
    rest.
    """

    def make(device: torch.device) -> Work:
        def params() -> list[torch.Tensor]:
            tensors = [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in sizes]
            for p in tensors:
                p.grad = torch.randn_like(p)
            return tensors

        inv_scale = torch.ones(1, device=device)
        fused = FusedAdamW(
            params(),
            lr=1e-4,
            clip_norm=1.0,
            stochastic_rounding=dtype == torch.bfloat16,
            backend="own",
        )

        def separate() -> Callable[[], object]:
            torch_params = params()
            optimizer = torch.optim.AdamW(torch_params, lr=1e-4, fused=True, capturable=True)
            overflow = torch.zeros((), device=device)
            grads = [p.grad for p in torch_params if p.grad is not None]

            def run() -> None:
                overflow.zero_()
                torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, inv_scale)
                torch.nn.utils.clip_grad_norm_(torch_params, 1.0, foreach=True)
                optimizer.found_inf = overflow  # type: ignore[attr-defined]
                optimizer.step()

            run()
            return run

        numbers = sum(math.prod(s) for s in sizes)
        wide = dtype.itemsize
        return Work(
            ours=lambda: fused.step(inv_scale=inv_scale),
            peers={"torch fused, separate passes": separate},
            # gradients are read twice, parameters and moments read and written
            bytes=numbers * (2 * wide + 2 * wide + 4 * 4),
            flops=20 * numbers,
            bound="hbm",
        )

    return make


LAYERS = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
    (1, 4096),
]

CASES: Cases = [
    *(
        Check("unscale_", str(d)[6:], _check_unscale(d))
        for d in (torch.float32, torch.float16, torch.bfloat16)
    ),
    Check("adamw", "fp32", _check_steps(torch.float32, False)),
    Check("adamw", "bf16", _check_steps(torch.bfloat16, False)),
    Check("adamw", "bf16 by chance", _check_steps(torch.bfloat16, True)),
    Bench("adamw", "two 8B layers, fp32", _step(2 * LAYERS, torch.float32), "adamw", 2),
    Bench("adamw", "two 8B layers, bf16 by chance", _step(2 * LAYERS, torch.bfloat16), rank=6),
]
