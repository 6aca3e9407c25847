"""GPU cases of a mixture of experts: gate, permutation, grouped products, all gradients; time at
model sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.moe import grouped_matmul, moe_gate, moe_permute, moe_unpermute


def run_layer(
    x: Tensor,
    logits: Tensor,
    w: Tensor,
    weights: Tensor,
    *,
    top_k: int,
    backend: str | None,
    dropped: bool = True,
) -> list[Tensor]:
    """Output and gradients of x, logits and w of a layer: gate, permute, multiply, unpermute.

    `weights` [T, N] multiplies the output before the sum. With `dropped` token 0's last choice is
    dropped.
    """
    x, logits, w = (t.detach().requires_grad_() for t in (x, logits, w))
    gates, experts = moe_gate(logits, top_k, renormalise=True, backend=backend)
    if dropped:
        experts = experts.clone()
        experts[0, -1] = w.shape[0]
    rows, permutation = moe_permute(x, experts, w.shape[0], backend=backend)
    out = moe_unpermute(
        grouped_matmul(rows, w, permutation.counts, backend=backend),
        permutation,
        gates,
        backend=backend,
    )
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [out.detach(), *(t.grad for t in (x, logits, w) if t.grad is not None)]


NAMES = ("out", "dx", "dlogits", "dw")


def random_layer(
    tokens: int,
    experts: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Random x [T, K], logits [T, E] fp32, w [E, N, K] and the output's weights [T, N]; one expert
    gets no token.
    """
    logits = torch.randn(tokens, experts, device=device)
    logits[:, experts // 2] = -30.0
    x, w = (
        torch.randn(tokens, k, device=device).to(dtype),
        torch.randn(experts, n, k, device=device).to(dtype),
    )
    return [x, logits, w / k**0.5, torch.randn(tokens, n, device=device).to(dtype)]


def _check(
    tokens: int, experts: int, top_k: int, k: int, n: int, dtype: torch.dtype
) -> Callable[..., list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        inputs = random_layer(tokens, experts, k, n, dtype, device)
        exact = run_layer(*(t.double() for t in inputs), top_k=top_k, backend="reference")
        plain = run_layer(*inputs, top_k=top_k, backend="reference")
        ours = run_layer(*inputs, top_k=top_k, backend="own")
        floor = 1e-2 if dtype == torch.bfloat16 else 2e-3
        return [compare(*four, floor=floor) for four in zip(NAMES, ours, exact, plain, strict=True)]

    return run


def _check_gate(
    tokens: int, experts: int, top_k: int, **how: Any
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        logits, bias = (
            torch.randn(tokens, experts, device=device),
            torch.rand(experts, device=device),
        )
        weights, chosen = moe_gate(logits, top_k, bias=bias, backend="own", **how)
        plain, expected = moe_gate(logits, top_k, bias=bias, backend="reference", **how)
        exact, _ = moe_gate(logits.double(), top_k, bias=bias, backend="reference", **how)
        other = (chosen != expected).float().mean().item()
        return [Compared("other experts", other, 0.0), compare("weights", weights, exact, plain)]

    return run


def _grouped(experts: int, rows_per_expert: int, k: int, n: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        count = experts * rows_per_expert
        x = torch.randn(count, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(experts, n, k, device=device, dtype=torch.bfloat16)
        counts = torch.full((experts,), rows_per_expert, device=device)
        offsets = counts.cumsum(0).int()

        def grouped_mm() -> Callable[[], object]:
            return lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)

        return Work(
            ours=lambda: grouped_matmul(x, w, counts, check=False, backend="own"),
            peers={"torch grouped_mm": grouped_mm},
            bytes=2 * (x.numel() + w.numel() + count * n),
            flops=2 * count * n * k,
            bound="hbm" if rows_per_expert < 128 else "tensor",
        )

    return make


def _unpermute(tokens: int, top_k: int, width: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        experts = torch.rand(tokens, 64, device=device).topk(top_k).indices
        gates = torch.rand(tokens, top_k, device=device)
        rows, permutation = moe_permute(x, experts, 64)
        place = permutation.position.long()

        def plain() -> Callable[[], object]:
            return lambda: (rows[place] * gates.unsqueeze(-1).to(rows.dtype)).sum(1)

        def compiled() -> Callable[[], object]:
            def summed(y: Tensor, p: Tensor, g: Tensor) -> Tensor:
                return (y[p] * g.unsqueeze(-1).to(y.dtype)).sum(1)

            fast = torch.compile(summed)
            return lambda: fast(rows, place, gates)

        return Work(
            ours=lambda: moe_unpermute(rows, permutation, gates, backend="own"),
            peers={"torch": plain, "torch.compile": compiled},
            bytes=2 * (rows.numel() + x.numel()) + gates.numel() * 8,
            flops=2 * rows.numel(),
            bound="hbm",
        )

    return make


CASES: Cases = [
    Check("moe", "ragged fp32", _check(70, 6, 2, 100, 72, torch.float32)),
    Check("moe", "ragged bf16", _check(300, 9, 3, 200, 136, torch.bfloat16)),
    Check("moe", "8 of 256", _check(130, 256, 8, 128, 64, torch.bfloat16)),
    Check(
        "moe",
        "gate 8 of 256, 4 of 8 groups",
        _check_gate(300, 256, 8, scoring="sigmoid", groups=8, top_k_groups=4),
    ),
    Check(
        "moe",
        "gate 6 of 160, 3 of 8 groups",
        _check_gate(300, 160, 6, groups=8, top_k_groups=3, scale=16.0),
    ),
    Bench(
        "moe", "grouped 64 experts x 512 rows, 2048 -> 1408", _grouped(64, 512, 2048, 1408), rank=4
    ),
    Bench("moe", "grouped 64 experts x 4 rows, 2048 -> 1408", _grouped(64, 4, 2048, 1408), rank=4),
    Bench("moe", "unpermute 16384 x 8 of 2048", _unpermute(16384, 8, 2048), rank=5),
]
