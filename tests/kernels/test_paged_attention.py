"""Paged attention on a CPU: the reference against plain attention, gathered pages, the plan, and
bad arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain, paged_attention, write_kv
from kernels.gpu.paged_attention import random_case
from kernels.paged_kv import plan_pages
from kernels.paged_kv.launch import FEW_ROWS
from kernels.paged_kv.work_partition import launches, work_table
from tests.kernels.compare import assert_close


def test_the_reference_is_attention_over_the_pages_in_order() -> None:
    inputs = random_case((7, 12), queries=3)
    got, lse = inputs.run("reference", torch.float64, return_lse=True)
    for b, length in enumerate((7, 12)):
        pages = inputs.table[b, : -(-length // 4)].long()
        k, v = (
            c[pages].flatten(0, 1)[:length].double().transpose(0, 1)
            for c in (inputs.k_cache, inputs.v_cache)
        )
        q = inputs.q[b].double().transpose(0, 1)
        seen = torch.ones(3, length, dtype=torch.bool).tril(length - 3)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )
        torch.testing.assert_close(got[b], expected.transpose(0, 1))
        scores = torch.einsum("hsd,hnd->hsn", q, k.repeat_interleave(2, 0)) / 4
        torch.testing.assert_close(
            lse[b].double(),
            scores.masked_fill(~seen, -torch.inf).logsumexp(-1).T,
            rtol=1e-6,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ({"lens": (5, 0, 37, 36, 2), "heads": (6, 2)}, {}),
        ({"lens": (17, 300, 290), "heads": (4, 4), "widths": (24, 16), "page": 8}, {"window": 9}),
        ({"lens": (3, 21, 20), "queries": 5, "heads": (6, 2)}, {"softcap": 2.0, "window": 6}),
        ({"lens": (5, 20, 9, 0, 6), "queries": (1, 0, 7, 0, 1), "page": 5}, {}),
        ({"lens": (60, 30), "queries": (40, 30), "heads": (4, 1)}, {}),
        ({"lens": (60,), "queries": (40,)}, {"window": 7}),
        ({"lens": (30, 18), "cache": torch.int8}, {}),
        ({"lens": (30, 18), "dtype": torch.float16}, {}),
    ],
)
def test_gathered_pages_match_the_reference(case: dict[str, Any], options: dict[str, Any]) -> None:
    inputs = random_case(**case)
    exact = inputs.run("reference", torch.float64, **options)
    got = inputs.run(None, **options)
    floor = 2e-6 if got.dtype == torch.float32 else 1e-3
    assert_close(["out"], [got], [exact], [inputs.run("reference", **options)], floor=floor)


def test_one_plan_serves_all_layers_and_groups_sequences() -> None:
    inputs = random_case((40, 38, 39, 3))
    plan = plan_pages(inputs.table, inputs.lens, blocks=inputs.k_cache.shape[0], block_size=4)
    torch.testing.assert_close(inputs.run(None, plan=plan), inputs.run("reference"))
    assert [g.sequences for g in plan.groups(None)] == [4]
    with pytest.raises(ValueError, match="another block_table"):
        paged_attention(
            inputs.q, inputs.k_cache, inputs.v_cache, inputs.table, inputs.lens.clone(), plan=plan
        )


def test_consecutive_blocks_are_not_copied() -> None:
    cache = torch.randn(2, 6, 4, 2, 16)
    table, lens = torch.tensor([[2, 3, 4]]), torch.tensor([10])
    (group,) = plan_pages(table, lens, blocks=6, block_size=4).groups(None)
    assert group.consecutive == 2
    q = torch.randn(1, 4, 16)
    got = paged_attention(q, cache[0], cache[1], table, lens)
    torch.testing.assert_close(
        got, paged_attention(q, cache[0], cache[1], table, lens, backend="reference")
    )


def test_tokens_are_written_to_their_slots() -> None:
    for caches in (torch.zeros(2, 3, 4, 2, 8), torch.zeros(3, 2, 4, 2, 8).transpose(0, 1)):
        k, v = torch.randn(2, 2, 3, 2, 8)
        write_kv(k, v, caches[0], caches[1], torch.tensor([[11, 0, -1], [5, 6, -1]]))
        torch.testing.assert_close(caches[0][2, 3], k[0, 0])
        torch.testing.assert_close(caches[1][1, 1:3], v[1, :2])
        assert (caches != 0).any(-1).sum() == 2 * 4 * 2


def test_the_reason_for_torch_on_a_cpu_is_recorded() -> None:
    dispatch.clear_records()
    inputs = random_case((4,))
    inputs.run(None)
    record = [t for t in explain() if t["op"] == "paged_attention"]
    assert record[0]["backend"] == "torch" and "CPU" in str(record[0]["reason"])


Q, CACHE, TABLE, LENS = (
    torch.randn(2, 4, 16),
    torch.zeros(6, 4, 2, 16),
    torch.tensor([[0, 1], [2, 5]]),
    torch.tensor([8, 5]),
)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"block_table": torch.tensor([[0, 6], [2, 5]])},
            ValueError,
            r"block_table\[0, 1\] is 6; the cache has blocks 0 to 5",
        ),
        (
            {"seq_lens": torch.tensor([8, 9])},
            ValueError,
            r"seq_lens\[1\] is 9; it must be in 0 to 8",
        ),
        ({"seq_lens": torch.tensor([-1, 9])}, ValueError, r"seq_lens\[0\] is -1"),
        ({"block_table": TABLE.float()}, TypeError, "block_table is float32"),
        ({"q": torch.randn(2, 3, 16)}, ValueError, "q has 3 heads and the cache 2"),
        ({"q": torch.randn(2, 4, 8)}, ValueError, "head dim 8"),
        ({"q": torch.randn(3, 4, 16)}, ValueError, "2 sequences of 1 tokens"),
        ({"q": Q.half()}, TypeError, "k_cache is torch.float32 and q is torch.float16"),
        ({"v_cache": torch.zeros(6, 4, 1, 16)}, ValueError, "v_cache has shape"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"num_programs": 0}, ValueError, "num_programs is 0"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"cu_q": torch.tensor([0, 1, 3])}, ValueError, "cu_q ends at 3 and q has 2"),
        ({"cu_q": torch.tensor([0, 3, 2])}, ValueError, "must rise from 0"),
        (
            {"k_cache": CACHE.to(torch.int8), "v_cache": CACHE.to(torch.int8)},
            TypeError,
            "k_cache is torch.int8",
        ),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {
        "q": Q,
        "k_cache": CACHE,
        "v_cache": CACHE,
        "block_table": TABLE,
        "seq_lens": LENS,
    }
    assert paged_attention(**good).shape == Q.shape
    with pytest.raises(error, match=message):
        paged_attention(**{**good, **changes})


def test_slots_beyond_the_cache_are_rejected() -> None:
    k = torch.randn(2, 2, 16)
    with pytest.raises(ValueError, match="slots contain 24; the cache has 24 slots"):
        write_kv(k, k, CACHE.clone(), CACHE.clone(), torch.tensor([1, 24]))
    with pytest.raises(ValueError, match="slots has shape"):
        write_kv(k, k, CACHE.clone(), CACHE.clone(), torch.tensor([1]))


def test_an_unchecked_plan_reads_its_values_when_used() -> None:
    inputs = random_case((30, 9), queries=(3, 1))
    lens = inputs.lens.clone().fill_(1)
    plan = plan_pages(
        inputs.table, lens, blocks=1, block_size=4, cu_q=inputs.cu, max_q=3, check=False
    )
    lens.copy_(inputs.lens)  # as before the replay of a captured graph
    got = paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.table, lens, cu_q=inputs.cu, plan=plan
    )
    torch.testing.assert_close(got, inputs.run("reference"))
    with pytest.raises(ValueError, match="pass max_q"):
        plan_pages(inputs.table, lens, blocks=1, block_size=4, cu_q=inputs.cu, check=False)


@pytest.mark.parametrize(
    ("lens", "queries"),
    [
        ([2048] * 63 + [4096], [1] * 63 + [2048]),  # decodes and one chunk of a prompt
        ([600] * 63 + [131_072], [1] * 64),  # one long sequence among decodes
    ],
)
def test_programs_have_equal_shares_of_mixed_batches(lens: list[int], queries: list[int]) -> None:
    """No program takes more than 1.15 times the mean number of key blocks, at 264 programs."""
    programs, kv_heads, group = 264, 8, 4
    pages = max(lens) // 16
    cu = torch.tensor([0, *queries]).cumsum(0)
    plan = plan_pages(
        torch.zeros(64, pages, dtype=torch.int32),
        torch.tensor(lens),
        blocks=1,
        block_size=16,
        cu_q=cu,
    )
    rows_of_launches = launches(plan, group, FEW_ROWS)
    assert len(rows_of_launches) == (2 if max(queries) > 1 else 1)
    covered = 0
    for rows in rows_of_launches:
        block_m = 16 if rows.up_to <= FEW_ROWS else 64
        table = work_table(plan, rows, block_m=block_m, block_n=64, window=None)
        total = int(table.ends[-1]) * kv_heads
        share = -(-total // programs)
        assert share * programs <= 1.15 * total
        sizes = table.ends.diff(prepend=torch.zeros(1, dtype=torch.int32))
        used = sizes > 0
        pairs = zip(table.sequences[used].tolist(), table.tiles[used].tolist(), strict=True)
        covered += len(set(pairs))
        keys = torch.tensor([lens[n] for n in table.sequences[used].tolist()])
        assert bool((sizes[used] * 64 < keys + 64).all())
    tiles = sum(-(-q * group // (16 if q * group <= FEW_ROWS else 64)) for q in queries)
    assert covered == tiles


def test_unchecked_lengths_and_blocks_stay_inside_the_cache() -> None:
    """With `check=False` a wrong length reads the sequence's own table only."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    plan = plan_pages(table, torch.tensor([1000, 12]), blocks=4, block_size=4, check=False)
    [rows] = launches(plan, 2, FEW_ROWS)
    work = work_table(plan, rows, block_m=16, block_n=4, window=None)
    assert work.ends.tolist() == [3, 6]
