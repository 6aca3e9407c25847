"""Eight ranks equal one process: three parallel axes at once, and HSDP with tensor parallelism."""

from __future__ import annotations

import pytest

from tests.workers.training.conftest import final_weights, relative
from tests.workers.training.pool import Pool, train_alone
from tests.workers.training.test_combined_parallelism import DENSE, FLAT, MAX_STEPS, spec

PLANS = [
    (DENSE, {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "schedule": "1f1b", "sequence_parallel": True}),
    (FLAT, {"dp": 4, "dp_replicate": 2, "tp": 2, "zero": 3, "sequence_parallel": True}),
]


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A pool for these tests only: idle ranks still use CPU time."""
    pool = Pool(8, tmp_path_factory.mktemp("pool") / "store")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("model", "plan"), PLANS, ids=[f"{model['name']} {plan}" for model, plan in PLANS]
)
def test_equal_to_one_process(model, plan, eight, tmp_path):
    one, result = (
        train_alone(spec(model, {}, steps=MAX_STEPS), tmp_path / "one"),
        eight.train(spec(model, plan, steps=MAX_STEPS), tmp_path / "eight"),
    )
    assert [outcome["class"] for outcome in result.outcomes] == ["ok"] * 8, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
        assert all(result.values(name, rank) == result.values(name) for rank in range(8)), name
    expected, actual = final_weights(one, MAX_STEPS), final_weights(result, MAX_STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4
