"""Dispatch and tuning: forced, tuned and default choices, their records, and the project's and
user's tables.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from kernels import dispatch, rms_norm, runtime, tuning
from kernels.dispatch import BackendUnavailable, Candidate, choose, explain
from kernels.gpu import tune
from kernels.paged_kv import plan_pages

MODULES_WITH_CACHED_CHOICES = (
    "norm.rms",
    "norm.layer",
    "gated_mlp.api",
    "rotary.api",
    "paged_kv.cache_write",
    "paged_kv.api",
)
CANDIDATES = [Candidate("own", "no GPU"), Candidate("cudnn"), Candidate("flash")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KERNELS_BACKEND", raising=False)
    tuning._tables.cache_clear()
    tuning._cached.clear()
    dispatch.clear_records()
    yield
    tuning._tables.cache_clear()
    tuning._cached.clear()
    dispatch.clear_records()


def test_the_first_supported_candidate_runs_with_a_reason() -> None:
    for _ in range(3):
        assert choose("op", {"dtype": torch.bfloat16, "n": 8}, CANDIDATES).backend == "cudnn"
    record = {
        "op": "op",
        "facts": {"dtype": "bfloat16", "n": 8},
        "backend": "cudnn",
        "reason": "not own: no GPU",
        "calls": 3,
    }
    assert explain() == [record] and json.dumps(explain())
    with pytest.raises(
        BackendUnavailable, match="op: no backend can run this call: not own: no GPU"
    ):
        choose("op", {}, CANDIDATES[:1])


def test_records_are_bounded() -> None:
    for n in range(dispatch.MAX_RECORDS + 50):
        choose("op", {"n": n}, CANDIDATES)
    assert len(explain()) == dispatch.MAX_RECORDS + 1
    assert explain()[-1]["facts"] == {} and explain()[-1]["calls"] == 50


def test_measured_user_orders_and_configurations_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "arch", lambda device=None: "sm_90")

    @tuning.rule("op.test")
    def _(arch: str, facts: dict[str, object]) -> tuning.Config:
        return {"block": 64, "num_warps": 4, "arch": arch}

    assert tuning.config("op.test", n=100) == {"block": 64, "num_warps": 4, "arch": "sm_90"}
    path = tuning.save("op.test", {"n": 100}, {"block": 128})
    assert "sm_90" in path.name and tuning.source_hash() in path.name
    assert tuning.config("op.test", n=128)["block"] == 128  # the same bucket
    assert tuning.config("op.test", n=129)["block"] == 64
    with tuning.override("op.test", block=16):
        assert tuning.config("op.test", n=128)["block"] == 16
    table = json.loads(path.read_text())
    table["order"] = {"op": {"*": ["flash", "own"]}}
    path.write_text(json.dumps(table))
    tuning._tables.cache_clear()
    assert choose("op", {}, CANDIDATES).backend == "flash"
    assert explain()[-1]["reason"] == "first in the tuned order"
    with tuning.record_lookups() as lookups:
        tuning.config("op.test", n=3)
    assert lookups == [("op.test", {"n": 3})]
    del tuning._rules["op.test"]


def test_own_kernels_take_plain_tensors_only() -> None:
    with FakeTensorMode():
        x = torch.ones(2, 8, device="cuda")
    assert "FakeTensor" in str(runtime.why_not(x)) and "FakeTensor" in str(
        runtime.why_not(torch.ones(1), x)
    )


def test_shipped_tables_are_readable_and_name_operations_that_exist() -> None:
    for path in (Path(tuning.__file__).parent / "tables").glob("*.json"):
        table = json.loads(path.read_text())
        assert set(table) == {"configs", "order"} and set(table["configs"]) <= set(tuning._rules)


def test_a_compiled_call_has_no_graph_break_and_is_recorded_once() -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    compiled = torch.compile(lambda x, w: rms_norm(x * 2, w), backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(
            compiled(x, w), torch.nn.functional.rms_norm(x * 2, (8,), w, 1e-6)
        )
    (record,) = explain()
    assert record["calls"] == 1 and str(record["reason"]).endswith("traced by torch.compile")


def test_a_repeated_call_is_neither_checked_nor_chosen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On every device: the meta device stands for one whose choice is not the CPU's."""

    def calls(device: str) -> None:
        x, w = torch.ones(2, 3, 4, 8, device=device), torch.ones(8, device=device)
        table, sin = torch.ones(3, 4, device=device), torch.ones(3, 4, device=device)
        kernels.rms_norm(x, w)
        kernels.rms_norm(x, w, residual=x)
        kernels.layer_norm(x, w, w)
        kernels.swiglu(x)
        kernels.apply_rope(x, x, table, sin)
        if device == "meta":
            return
        cache = torch.zeros(4, 2, 4, 8)
        slots, lens = torch.arange(3), torch.tensor([3])
        kernels.write_kv(x[0], x[0], cache, cache, slots, check=False)
        pages = torch.tensor([[0, 1]])
        plan = plan_pages(pages, lens, blocks=4, block_size=2)
        kernels.paged_attention(x[0, :1], cache, cache, pages, lens, plan=plan)

    for device in ("cpu", "meta"):
        calls(device)
        counts = {(str(r["op"]), str(r["facts"])): r["calls"] for r in kernels.explain()}
        with monkeypatch.context() as patched:
            for module in MODULES_WITH_CACHED_CHOICES:
                patched.setattr(importlib.import_module(f"kernels.{module}"), "choose", None)
            calls(device)
        again = {(str(r["op"]), str(r["facts"])): r["calls"] for r in kernels.explain()}
        assert all(again[kind] >= count for kind, count in counts.items())
        assert sum(map(int, again.values())) > sum(map(int, counts.values()))
    x = torch.ones(4, 4, device="meta")
    assert dispatch.call_key("op", (x,)) != dispatch.call_key("op", (x.t(),))


FACTS: dict[str, list[dict[str, object]]] = {
    **{
        f"attention_{part}": [
            {"d": d, "dv": d, "wide": wide, "causal": True, "window": False, "softcap": False}
            for d, wide in ((64, False), (128, False), (256, False), (128, True))
        ]
        for part in ("forward", "forward_tma", "keys_values", "queries")
    },
    "paged_attention": [
        {"dtype": torch.bfloat16, "head_dim": 128, "rows": rows} for rows in (4, 256)
    ],
    "mla_decode": [{"dtype": torch.bfloat16, "latent": 512, "rows": rows} for rows in (16, 128)],
    "fp8_matmul": [{"rows": rows, "n": 4096, "k": 4096} for rows in (16, 4096)],
    "int4_matmul": [
        {"dtype": dtype, "rows": 16, "n": 4096, "k": 4096}
        for dtype in (torch.bfloat16, torch.float32)
    ],
    "int8_matmul": [{"dtype": torch.bfloat16, "rows": 16, "n": 4096, "k": 4096}],
    "grouped_matmul": [{"dtype": torch.bfloat16, "rows": rows, "of": "rows"} for rows in (16, 512)],
    "linear_cross_entropy": [{"dtype": torch.bfloat16, "columns": 131072}],
}


@pytest.mark.parametrize("op", FACTS)
def test_candidates_change_what_their_rule_returns(op: str) -> None:
    for module in (
        "attention.triton_kernels.configs",
        "paged_kv.launch",
        "mla.decode",
        "fp8.matmul",
        "int4.matmul",
        "int8.matmul",
        "moe.grouped_kernels",
        "cross_entropy.row_kernel",
    ):
        importlib.import_module(f"kernels.{module}")
    for arch in ("sm_80", "sm_90"):
        for facts in FACTS[op]:
            default = tuning._rules[op](arch, facts)
            changes = tuning._candidates[op](arch, facts)
            assert 3 <= len(changes) <= 12, (arch, facts, changes)
            for change in changes:
                assert change and change.keys() <= default.keys()
                assert all(default[name] != value for name, value in change.items())
    if op == "attention_forward":
        assert tuning._candidates[op]("sm_90", FACTS[op][1])[0] == {"tma": True}


def test_a_candidate_with_other_results_is_not_saved() -> None:
    exact = [torch.linspace(-1, 1, 64)]
    assert tune._agree([exact[0] + 1e-3], exact)
    assert not tune._agree([exact[0].flip(0)], exact) and not tune._agree(
        [exact[0] * torch.nan], exact
    )
