"""GPU cases of apply_rope: halves, interleaved, part of the head, into a cache; against torch and
Liger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.gpu.comparison import nan_padded, values_and_gradients
from kernels.paged_kv import write_kv
from kernels.rotary import apply_rope, reference


def _tables(length: int, pairs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** (-torch.arange(pairs, device=device) / pairs)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def _check(
    heads: int, kv_heads: int, dim: int, pairs: int, dtype: torch.dtype, interleaved: bool
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(dim)
        inputs = [nan_padded(2, 50, n, dim, device=device, dtype=dtype) for n in (heads, kv_heads)]
        cos, sin = _tables(100, pairs, device)
        positions = torch.randint(0, 100, (2, 50), device=device)

        def call(backend: str, inputs: list[torch.Tensor]) -> Any:
            q, k = inputs
            return apply_rope(q, k, cos, sin, positions, interleaved=interleaved, backend=backend)

        return values_and_gradients(["q", "k", "dq", "dk"], call, inputs, plain="reference")

    return run


def _check_cache(device: torch.device) -> list[Compared]:
    torch.manual_seed(0)
    q, k, v = (nan_padded(40, n, d, device=device) for n, d in ((8, 128), (2, 128), (2, 96)))
    cos, sin = _tables(64, 64, device)
    positions = torch.arange(40, device=device)
    slots = torch.randperm(64, device=device)[:40]
    slots[::7] = -1

    def written(backend: str) -> list[torch.Tensor]:
        k_cache, v_cache = (
            torch.full((4, 16, 2, d), 9.0, device=device, dtype=q.dtype) for d in (128, 96)
        )
        turned: Any = apply_rope(
            q, k, cos, sin, positions, (v, k_cache, v_cache, slots), backend=backend
        )
        return [turned, k_cache, v_cache]

    ours, plain = written("own"), written("reference")
    return [
        compare(*some, floor=8e-3)
        for some in zip(("q", "k_cache", "v_cache"), ours, plain, plain, strict=True)
    ]


def _turn(tokens: int, heads: int, kv_heads: int, dim: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        q, k = (
            torch.randn(4, tokens // 4, n, dim, device=device, dtype=torch.bfloat16)
            for n in (heads, kv_heads)
        )
        cos, sin = _tables(tokens // 4, dim // 2, device)

        def plain(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
            angles = cos.repeat(4, 1), sin.repeat(4, 1)
            return tuple(
                reference.rotate(t.flatten(0, 1), *angles, False).to(t.dtype) for t in (q, k)
            )

        def compiled() -> Callable[[], object]:
            fast = torch.compile(plain)
            return lambda: fast(q, k)

        def liger() -> Callable[[], object]:
            from liger_kernel.ops.rope import rope_forward  # type: ignore[import-not-found]

            rotated = q.clone().transpose(1, 2), k.clone().transpose(1, 2)  # rotates in place
            wide = [torch.cat((t, t), -1)[None].to(q.dtype) for t in (cos, sin)]
            return lambda: rope_forward(*rotated, *wide)

        return Work(
            ours=lambda: apply_rope(q, k, cos, sin, backend="own"),
            peers={"torch": lambda: lambda: plain(q, k), "torch.compile": compiled, "liger": liger},
            bytes=2 * (q.numel() + k.numel()) * 2,
            flops=3 * (q.numel() + k.numel()),
            bound="hbm",
        )

    return make


def _into_cache(tokens: int, heads: int, kv_heads: int, dim: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        q, k, v = (
            torch.randn(tokens, n, dim, device=device, dtype=torch.bfloat16)
            for n in (heads, kv_heads, kv_heads)
        )
        cos, sin = _tables(tokens, dim // 2, device)
        positions, slots = (
            torch.arange(tokens, device=device),
            torch.randperm(tokens, device=device),
        )
        shape = (2, tokens // 16, 16, kv_heads, dim)
        k_cache, v_cache = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        cache = (v, k_cache, v_cache, slots)

        def separate() -> None:
            turned: Any = apply_rope(q, k, cos, sin, positions, check=False, backend="own")
            write_kv(turned[1], v, k_cache, v_cache, slots, check=False)

        return Work(
            ours=lambda: apply_rope(q, k, cos, sin, positions, cache, check=False, backend="own"),
            peers={"separate calls": lambda: separate},
            bytes=2 * (q.numel() + k.numel() + v.numel()) * 2,
            flops=3 * (q.numel() + k.numel()),
            bound="hbm",
        )

    return make


CASES: Cases = [
    *(
        Check(
            "apply_rope",
            f"{h}/{g} heads of {d}, {r} pairs {str(dtype)[6:]}{' interleaved' * i}",
            _check(h, g, d, r, dtype, i),
        )
        for h, g, d, r, dtype, i in [
            (32, 8, 128, 64, torch.bfloat16, False),
            (5, 1, 80, 20, torch.float32, False),
            (16, 1, 64, 32, torch.float16, True),
        ]
    ),
    Check("apply_rope", "into a cache", _check_cache),
    Bench("apply_rope", "16384 tokens, 32/8 heads of 128", _turn(16384, 32, 8, 128), "rope", 2),
    Bench(
        "apply_rope",
        "into a cache, 16384 tokens, 32/8 heads of 128",
        _into_cache(16384, 32, 8, 128),
        "rope-cache",
        3,
    ),
]
