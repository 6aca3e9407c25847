"""Latent attention over pages: against attention with up-projected keys and values, and bad
arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import mla_decode
from kernels.gpu.mla_decode import random_latents


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_absorbed_projections_match_up_projected_keys_and_values(backend: str) -> None:
    heads, nope, rotary, rank, value = 3, 10, 4, 16, 12
    inputs = random_latents(
        (9, 2, 14), heads=heads, queries=2, widths=(rank, rotary), dtype=torch.float64
    )
    up_k, up_v = torch.randn(heads, nope, rank).double(), torch.randn(heads, value, rank).double()
    q, q_rope = torch.randn(3, 2, heads, nope).double(), inputs["q_rope"]
    absorbed: Any = inputs | {"q_nope": torch.einsum("bshn,hnr->bshr", q, up_k)}
    got: Any = mla_decode(**absorbed, scale=0.3, backend=backend)
    got = torch.einsum("bshr,hvr->bshv", got, up_v)
    for b, length in enumerate((9, 2, 14)):
        rows = inputs["latent_cache"][inputs["block_table"][b, : -(-length // 4)].long()].flatten(
            0, 1
        )[:length]
        latent, key = rows.split((rank, rotary), -1)
        k = torch.cat((torch.einsum("nr,hdr->hnd", latent, up_k), key.expand(heads, -1, -1)), -1)
        v = torch.einsum("nr,hdr->hnd", latent, up_v)
        wide = torch.cat((q[b], q_rope[b]), -1).transpose(0, 1)
        seen = torch.ones(2, length, dtype=torch.bool).tril(length - 2)
        expected = scaled_dot_product_attention(wide, k, v, attn_mask=seen, scale=0.3)
        torch.testing.assert_close(got[b], expected.transpose(0, 1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_rope": torch.randn(2, 1, 3, 8)}, ValueError, "latent_cache has shape"),
        ({"q_nope": torch.randn(2, 1, 3, 32).half()}, TypeError, "must be equal"),
        ({"seq_lens": torch.tensor([3, 99])}, ValueError, r"seq_lens\[1\] is 99"),
        ({"block_table": torch.full((2, 3), 50)}, ValueError, r"block_table\[0, 0\] is 50"),
        ({"scale": 0.0}, ValueError, "scale is 0"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
        (
            {"block_table": torch.zeros(3, 3).int(), "seq_lens": torch.ones(3).int()},
            ValueError,
            "3 sequences of 1",
        ),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = random_latents((3, 7), heads=3) | {"scale": 0.2}
    assert not mla_decode(**good).isnan().any()  # type: ignore[union-attr]
    with pytest.raises(error, match=message):
        mla_decode(**{**good, **changes})
