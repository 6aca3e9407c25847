"""Paged attention by several programs and cache writes: ragged batches, windows, caps, quantized
caches, items in parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import write_kv
from kernels.gpu.paged_attention import random_case
from tests.kernels.compare import assert_close
from tests.matrix import select

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"lens": (5, 0, 37), "heads": (6, 2)}, {}),
    ({"lens": (17, 40), "heads": (4, 4), "widths": (24, 16), "page": 8}, {"window": 9}),
    ({"lens": (3, 21), "queries": 5, "heads": (6, 2)}, {"softcap": 2.0, "window": 6}),
    ({"lens": (5, 20, 9, 0), "queries": (1, 0, 7, 0), "page": 5}, {}),
    ({"lens": (40,), "queries": (20,), "heads": (4, 1)}, {}),
    ({"lens": (50, 1, 70, 33), "queries": (20, 1, 1, 1), "heads": (4, 2)}, {"window": 30}),
]


@pytest.mark.parametrize(("case", "options"), select(CASES, [2, 3, 5]))
def test_several_programs(case: dict[str, Any], options: dict[str, Any]) -> None:
    inputs = random_case(**case)
    exact, exact_lse = inputs.run("reference", torch.float64, return_lse=True, **options)
    plain = inputs.run("torch", **options)
    for programs in (None, 1, 7):
        out, lse = inputs.run("own", num_programs=programs, return_lse=True, **options)
        assert_close(["out", "lse"], [out, lse], [exact, exact_lse], [plain, exact_lse], floor=2e-6)


@pytest.mark.parametrize("dtype", select([torch.bfloat16, torch.float16]))
def test_half_types(dtype: torch.dtype) -> None:
    inputs = random_case((9, 30), dtype=dtype, widths=(64, 64))
    exact = inputs.run("reference", torch.float64)
    assert_close(["out"], [inputs.run("own", num_programs=3)], [exact], [inputs.run("torch")])


@pytest.mark.parametrize("cache", select([torch.int8, torch.float8_e4m3fn]))
def test_a_quantized_cache_matches_torch(cache: torch.dtype) -> None:
    inputs = random_case((30, 18), cache=cache)
    exact = inputs.run("reference", torch.float64)
    assert_close(
        ["out"], [inputs.run("own", num_programs=3)], [exact], [inputs.run("torch")], floor=2e-6
    )
    k, v = torch.randn(2, 3, 2, 16)
    slots = torch.tensor([7, -1, 2])
    caches: dict[str, list[torch.Tensor]] = {}
    for backend in ("own", "torch"):
        k_cache, v_cache = (torch.zeros(3, 4, 2, 16).to(cache) for _ in range(2))
        scales = (torch.zeros(3, 4, 2), torch.zeros(3, 4, 2))
        write_kv(k, v, k_cache, v_cache, slots, scales=scales, backend=backend)
        caches[backend] = [
            k_cache.float() * scales[0][..., None],
            v_cache.float() * scales[1][..., None],
        ]
    for own, reference in zip(caches["own"], caches["torch"], strict=True):
        # the interpreter's e4m3 loses subnormals and, in some roundings up, the carry to the
        # exponent
        close = torch.isclose(own, reference, rtol=2**-3, atol=2e-2).float().mean()
        assert close == 1 or (cache == torch.float8_e4m3fn and close > 0.98)
