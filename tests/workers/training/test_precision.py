"""bf16 and fp16 over fp32 weights in every ZeRO stage; gradient reduction in 16 bits."""

from __future__ import annotations

import pytest

from tests.matrix import FULL
from tests.workers.training.conftest import make_spec

STEPS = 5 if FULL else 3
BATCH = {"global_batch_size": 4, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def fp32(train, tmp_path_factory):
    return train(make_spec(None, BATCH, steps=STEPS), tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="module")
def halves(train, tmp_path_factory):
    return {
        precision: train(
            make_spec(None, {**BATCH, "precision": precision}, steps=STEPS),
            tmp_path_factory.mktemp("half"),
        )
        for precision in ("bf16", "fp16")
    }


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-3), ("fp16", 2e-4)])
def test_half_follows_fp32(precision, tolerance, fp32, halves):
    half = halves[precision]
    assert half.values("loss") == pytest.approx(fp32.values("loss"), rel=tolerance)
    assert half.values("loss") != fp32.values("loss")
    params, copies = (half.values(f"memory/{name}_bytes")[0] for name in ("params", "buffers"))
    assert copies == params / 2, "a 16-bit copy of every fp32 weight"
    # rope tables, the loss and its fp32 logits keep their size
    assert (
        half.values("memory/activations_bytes")[0]
        < 0.7 * fp32.values("memory/activations_bytes")[0]
    )


@pytest.mark.parametrize(
    ("precision", "zero"), [("bf16", 0), ("bf16", 2), ("fp16", 1), ("fp16", 3)]
)
def test_half_equals_one_process(precision, zero, halves, train, tmp_path):
    result = train(
        make_spec(None, {**BATCH, "precision": precision, "dp": 2, "zero": zero}, steps=STEPS),
        tmp_path,
    )
    assert result.values("loss") == pytest.approx(halves[precision].values("loss"), rel=2e-4)
    assert result.values("grad_norm") == pytest.approx(
        halves[precision].values("grad_norm"), rel=2e-3
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduction_in_16_bits_with_prefetch(precision, halves, train, tmp_path):
    plan = {
        "dp": 2,
        "zero": 3,
        "precision": precision,
        "reduce_dtype": precision,
        "prefetch_layers": 1,
    }
    result = train(make_spec(None, {**BATCH, **plan}, steps=STEPS), tmp_path)
    assert result.values("loss") == pytest.approx(halves[precision].values("loss"), rel=2e-3)
    assert result.values("loss") != halves[precision].values("loss")
