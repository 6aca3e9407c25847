"""GPU cases of paged attention: decode, verification and prefill over a cache filled with NaN;
decode bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.paged_kv import paged_attention, plan_pages, write_kv


@dataclass(frozen=True)
class Paged:
    """Queries and a cache in which every unwritten value is NaN and every unused table entry -7."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lens: Tensor
    cu: Tensor | None
    scales: tuple[Tensor, Tensor] | None

    def run(self, backend: str | None, dtype: torch.dtype | None = None, **options: Any) -> Any:
        """The operation on this case; with `dtype`, on its exact values in that type."""
        q, k, v, scales = self.q, self.k_cache, self.v_cache, self.scales
        if dtype is not None:
            q = q.to(dtype)
            if scales is None:
                k, v = k.to(dtype), v.to(dtype)
        return paged_attention(
            q, k, v, self.table, self.lens, cu_q=self.cu, scales=scales, backend=backend, **options
        )


def random_case(
    lens: Sequence[int],
    *,
    queries: int | Sequence[int] = 1,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    page: int = 4,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Paged:
    """A random case; `queries` as a list makes it ragged. The cache's rows have odd strides unless
    quantized.
    """
    (h, g), count = heads, len(lens)
    pages = max(-(-n // page) for n in lens) + 1
    blocks = count * pages + 3
    table = torch.randperm(blocks, device=device)[: count * pages].view(count, pages).int()
    scales: tuple[Tensor, Tensor] | None = None
    if cache is None:
        wide = torch.full(
            (blocks, page, g, sum(widths) + 8), float("nan"), device=device, dtype=dtype
        )
        k_cache, v_cache = wide[..., : widths[0]], wide[..., widths[0] + 8 :]
    else:
        k_cache, v_cache = (
            torch.zeros(blocks, page, g, w, device=device).to(cache) for w in widths
        )
        k_scales, v_scales = torch.full((2, blocks, page, g), float("nan"), device=device)
        scales = (k_scales, v_scales)
    for sequence, length in enumerate(lens):
        at = torch.arange(length, device=device)
        slots = table[sequence].long()[at // page] * page + at % page
        k, v = (torch.randn(length, g, w, device=device).to(dtype) for w in widths)
        write_kv(k, v, k_cache, v_cache, slots, scales=scales)
        table[sequence, -(-length // page) :] = -7
    cu: Tensor | None = None
    if isinstance(queries, int):
        q = torch.randn(count, queries, h, widths[0], device=device).to(dtype)
    else:
        cu = torch.tensor([0, *queries], device=device).cumsum(0).int()
        q = torch.randn(sum(queries), h, widths[0], device=device).to(dtype)
    return Paged(q, k_cache, v_cache, table, torch.tensor(lens, device=device).int(), cu, scales)


def _check(
    dtype: torch.dtype, options: dict[str, Any], **case: Any
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        inputs = random_case(dtype=dtype, device=device, **case)
        exact, exact_lse = inputs.run("reference", torch.float64, return_lse=True, **options)
        plain = inputs.run("torch", **options)
        comparisons = []
        for programs in (None, 1, 37):
            out, lse = inputs.run("own", num_programs=programs, return_lse=True, **options)
            comparisons.append(compare(f"out, programs {programs}", out, exact, plain, floor=2e-3))
            comparisons.append(
                compare(f"lse, programs {programs}", lse, exact_lse, exact_lse, floor=2e-3)
            )
        return comparisons

    return run


def _decode(
    batch: int, length: int, heads: tuple[int, int], width: int, cache: torch.dtype | None = None
) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        page, kind = 16, torch.bfloat16
        pages = length // page
        blocks = batch * pages
        shape = (blocks, page, heads[1], width)
        scales = None
        if cache is None:
            k_cache, v_cache = (torch.randn(shape, device=device, dtype=kind) for _ in range(2))
        else:
            k_cache, v_cache = (
                torch.randint(-100, 100, shape, device=device, dtype=torch.int8) for _ in range(2)
            )
            scales = (torch.rand(shape[:3], device=device), torch.rand(shape[:3], device=device))
        table = torch.randperm(blocks, device=device).int().view(batch, pages)
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        q = torch.randn(batch, heads[0], width, device=device, dtype=kind)
        plan = plan_pages(table, lens, blocks=blocks, block_size=page)

        def contiguous() -> Callable[[], object]:
            if cache is not None:
                raise ValueError("torch's attention does not support a quantized cache")
            from torch.nn.functional import scaled_dot_product_attention as sdpa

            k, v = (
                torch.randn(batch, heads[1], length, width, device=device, dtype=kind)
                for _ in range(2)
            )
            return lambda: sdpa(q.unsqueeze(2), k, v, enable_gqa=True)

        moved = k_cache.numel() * k_cache.element_size() * 2 + 2 * q.numel() * 2
        moved += 0 if scales is None else 2 * scales[0].numel() * 4
        return Work(
            ours=lambda: paged_attention(
                q, k_cache, v_cache, table, lens, plan=plan, scales=scales, backend="own"
            ),
            peers={"torch SDPA, contiguous cache": contiguous},
            bytes=moved,
            flops=4 * batch * heads[0] * length * width,
            bound="hbm",
            reads=True,
        )

    return make


_SHAPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "decode ragged 128",
        {},
        {"lens": (1, 0, 700, 33), "heads": (16, 4), "widths": (128, 128), "page": 16},
    ),
    (
        "decode 80 window",
        {"window": 50},
        {"lens": (9, 300), "heads": (6, 2), "widths": (80, 80), "page": 8},
    ),
    (
        "verify softcap",
        {"softcap": 20.0},
        {"lens": (77, 3), "queries": 5, "heads": (9, 3), "widths": (64, 64)},
    ),
    (
        "mixed",
        {},
        {
            "lens": (500, 200, 64),
            "queries": (130, 1, 64),
            "heads": (8, 2),
            "widths": (128, 128),
            "page": 16,
        },
    ),
    ("decode 256", {}, {"lens": (90, 1000), "heads": (8, 1), "widths": (256, 256), "page": 32}),
    ("int8", {}, {"lens": (90, 1000), "heads": (8, 2), "widths": (128, 128), "cache": torch.int8}),
    (
        "e4m3",
        {},
        {"lens": (90, 400), "heads": (8, 2), "widths": (128, 128), "cache": torch.float8_e4m3fn},
    ),
]

CASES: Cases = [
    *(
        Check("paged_attention", f"{name} {kind}", _check(kind, options, **case))
        for kind in (torch.bfloat16, torch.float16)
        for name, options, case in _SHAPES
    ),
    Bench(
        "paged_attention",
        "decode B32 4k 32/8 x 128",
        _decode(32, 4096, (32, 8), 128),
        goal="paged-decode",
        rank=1,
    ),
    Bench("paged_attention", "decode B1 4k 32/8 x 128", _decode(1, 4096, (32, 8), 128), rank=3),
    Bench("paged_attention", "decode B128 2k 64/8 x 64", _decode(128, 2048, (64, 8), 64), rank=3),
    Bench(
        "paged_attention",
        "decode B32 4k 32/8 x 128 int8",
        _decode(32, 4096, (32, 8), 128, torch.int8),
        rank=4,
    ),
]
