"""GPU cases of MLA decode: DeepSeek's widths at several head counts, two query tokens; bytes per
second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work, compare
from kernels.mla import mla_decode
from kernels.paged_kv import plan_pages, write_kv


def random_latents(
    lens: tuple[int, ...],
    *,
    heads: int,
    queries: int = 1,
    widths: tuple[int, int] = (32, 16),
    page: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """A random case: unwritten cache rows are NaN, unused table entries are -7."""
    latent, rotary = widths
    pages = max(-(-n // page) for n in lens) + 1
    blocks = len(lens) * pages + 2
    table = torch.randperm(blocks, device=device)[: len(lens) * pages].view(len(lens), pages).int()
    cache = torch.full((blocks, page, latent + rotary), float("nan"), dtype=dtype, device=device)
    for sequence, length in enumerate(lens):
        at = torch.arange(length, device=device)
        slots = table[sequence].long()[at // page] * page + at % page
        c, k = (torch.randn(length, 1, w, device=device).to(dtype) for w in widths)
        write_kv(c, k, cache[..., :latent].unsqueeze(2), cache[..., latent:].unsqueeze(2), slots)
        table[sequence, -(-length // page) :] = -7
    q, q_rope = (torch.randn(len(lens), queries, heads, w, device=device).to(dtype) for w in widths)
    case = {"q_nope": q, "q_rope": q_rope, "latent_cache": cache, "block_table": table}
    return case | {"seq_lens": torch.tensor(lens, device=device).int()}


def to_fp64(case: dict[str, Any]) -> dict[str, Any]:
    """The case's values in fp64."""
    return {name: x.double() if x.is_floating_point() else x for name, x in case.items()}


def _check(
    heads: int, queries: int, lens: tuple[int, ...]
) -> Callable[[torch.device], list[Compared]]:
    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(0)
        kind = torch.bfloat16
        case = random_latents(
            lens, heads=heads, queries=queries, widths=(512, 64), page=64, dtype=kind, device=device
        )
        plain: Any = mla_decode(**case, scale=0.05, backend="torch")
        exact: Any = mla_decode(**to_fp64(case), scale=0.05, backend="reference")
        comparisons = []
        for splits in (None, 1, 7):
            ours: Any = mla_decode(**case, scale=0.05, num_splits=splits, backend="own")
            comparisons.append(compare(f"splits {splits}", ours, exact, plain, floor=2e-3))
        return comparisons

    return run


def _bench(batch: int, length: int, heads: int) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        page, kind = 64, torch.bfloat16
        blocks = batch * length // page
        cache = torch.randn(blocks, page, 576, device=device, dtype=kind)
        table = torch.randperm(blocks, device=device).int().view(batch, -1)
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        q = torch.randn(batch, heads, 512, device=device, dtype=kind)
        q_rope = torch.randn(batch, heads, 64, device=device, dtype=kind)
        plan = plan_pages(table, lens, blocks=blocks, block_size=page)

        def products() -> Callable[[], object]:
            rows = cache[table.long()].view(batch, length, 576)
            wide = torch.cat((q, q_rope), -1)
            return lambda: (wide @ rows.mT * 0.05).softmax(-1) @ rows[..., :512]

        return Work(
            ours=lambda: mla_decode(
                q, q_rope, cache, table, lens, scale=0.05, plan=plan, backend="own"
            ),
            peers={"torch products, contiguous cache": products},
            bytes=cache.numel() * 2 + q.numel() * 4 + q_rope.numel() * 2,
            flops=2 * batch * heads * length * (576 + 512),
            bound="hbm",
            reads=True,
        )

    return make


CASES: Cases = [
    Check("mla_decode", "16 heads", _check(16, 1, (1, 0, 700, 2000))),
    Check("mla_decode", "128 heads", _check(128, 1, (90, 1500))),
    Check("mla_decode", "20 heads, 2 tokens", _check(20, 2, (1, 64, 333))),
    Bench("mla_decode", "B128 4k 16 heads", _bench(128, 4096, 16), goal="mla-decode", rank=1),
    Bench("mla_decode", "B64 4k 64 heads", _bench(64, 4096, 64), rank=3),
    Bench("mla_decode", "B64 4k 128 heads", _bench(64, 4096, 128), rank=3),
]
