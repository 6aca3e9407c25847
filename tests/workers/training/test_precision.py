"""bf16 computes over fp32 weights alike in every stage; recomputed activations change memory and nothing else."""

from __future__ import annotations

import pytest

from tests.workers.training.conftest import TINY, make_spec

BATCH = {"global_batch_size": 4, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def fp32(train, tmp_path_factory):
    return train(make_spec(None, BATCH, steps=12), tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="module")
def bf16(train, tmp_path_factory):
    return train(make_spec(None, {**BATCH, "precision": "bf16"}, steps=12), tmp_path_factory.mktemp("bf16"))


def test_bf16_follows_fp32(fp32, bf16):
    assert bf16.values("loss") == pytest.approx(fp32.values("loss"), rel=2e-3)
    assert bf16.values("loss") != fp32.values("loss")
    params, copies = (bf16.values(f"memory/{name}_bytes")[0] for name in ("params", "buffers"))
    assert copies == params / 2, "a bf16 copy of every fp32 weight"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_of_one_process(zero, bf16, train, tmp_path):
    result = train(make_spec(None, {**BATCH, "precision": "bf16", "dp": 2, "zero": zero}, steps=12), tmp_path)
    assert result.values("loss") == pytest.approx(bf16.values("loss"), rel=2e-4)
    assert result.values("grad_norm") == pytest.approx(bf16.values("grad_norm"), rel=2e-3)


@pytest.mark.parametrize(
    "plan", [{}, {"precision": "bf16"}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 3, "precision": "bf16"}]
)
def test_recomputing_changes_memory_only(plan, fp32, bf16, train, tmp_path):
    dropout = {**TINY, "dropout": 0.1}
    plain = train(make_spec(dropout, {**BATCH, **plan}), tmp_path / "plain")
    again = train(make_spec(dropout, {**BATCH, **plan, "recompute": "full"}), tmp_path / "again")
    for name in ("loss", "grad_norm"):
        assert again.values(name) == pytest.approx(plain.values(name), rel=1e-6), name
    less, more = (result.values("memory/activations_bytes")[0] for result in (again, plain))
    assert less < 0.6 * more
    assert again.values("hfu") == pytest.approx([4 / 3 * mfu for mfu in again.values("mfu")])


def test_reducing_in_bf16_and_gathering_ahead(bf16, train, tmp_path):
    plan = {"dp": 2, "zero": 3, "precision": "bf16", "reduce_dtype": "bf16", "prefetch_layers": 1}
    result = train(make_spec(None, {**BATCH, **plan}, steps=12), tmp_path)
    assert result.values("loss") == pytest.approx(bf16.values("loss"), rel=2e-3)
    assert result.values("loss") != bf16.values("loss")
