"""Three axes at once, and copies of shards beside tensor parallelism: on eight ranks what one
process learns.
"""

from __future__ import annotations

import pytest

from tests.workers.training.conftest import final_weights, relative
from tests.workers.training.pool import Pool, train_alone
from tests.workers.training.test_combined_parallelism import DENSE, FLAT, STEPS, spec

PLANS = [
    (DENSE, {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "schedule": "1f1b", "sequence_parallel": True}),
    (FLAT, {"dp": 4, "dp_replicate": 2, "tp": 2, "zero": 3, "sequence_parallel": True}),
]


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A pool that ends with these tests: so many ranks wake up too often to stay."""
    pool = Pool(8, tmp_path_factory.mktemp("pool") / "store")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("model", "plan"), PLANS, ids=[f"{model['name']} {plan}" for model, plan in PLANS]
)
def test_equal_to_one_process(model, plan, eight, tmp_path):
    one, result = (
        train_alone(spec(model, {}), tmp_path / "one"),
        eight.train(spec(model, plan), tmp_path / "eight"),
    )
    assert [outcome["class"] for outcome in result.outcomes] == ["ok"] * 8, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
        assert all(result.values(name, rank) == result.values(name) for rank in range(8)), name
    theirs, ours = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(ours[name], theirs[name]) for name in theirs) <= 1e-4
