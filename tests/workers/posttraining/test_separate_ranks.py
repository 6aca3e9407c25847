"""Two training and two rollout ranks: equal to one process, for all weights or LoRA."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.matrix import select
from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.test_killed_runs import Attempts
from tests.workers.posttraining.test_policy_runs import prompts, spec
from tests.workers.training.conftest import relative
from workers.models.weights.open import open_weights
from workers.models.weights.parameter_shapes import weight_shapes

__all__ = ["prompts"]
pytestmark = pytest.mark.ranks
ROLLOUT = {"max_new_tokens": 6, "sync": "separate", "devices": 2}
STALE = {"max": 2, "correction": "decoupled"}
CASES = [
    ({"dp": 2, "zero": 2}, False),
    ({"pp": 2, "schedule": "1f1b"}, True),
    ({"dp": 2, "zero": 3}, True),
    ({"dp": 2, "zero": 3}, False),
    ({"dp": 2, "zero": 2}, True),
]


@pytest.fixture(scope="module")
def base(pools, prompts, tmp_path_factory):
    """Initial weights for adapters."""
    result = run_policy(pools, spec(prompts, steps=4), tmp_path_factory.mktemp("base"))
    return result.directory / "checkpoints/step-00000004"


def trained(base, adapted):
    """The part of `train` that names the trained weights."""
    if not adapted:
        return {}
    return {"init_from": {"path": str(base)}, "adapter": {"method": "lora", "rank": 4}}


def losses(attempts):
    return [each["values"]["loss"] for each in attempts.points()]


@pytest.mark.parametrize(("plan", "adapted"), select(CASES, 2))
def test_synchronous_ranks_equal_one_process(pools, prompts, base, tmp_path, plan, adapted):
    given = trained(base, adapted)
    one = run_policy(pools, spec(prompts, **given), tmp_path / "one")
    assert one.outcomes[0]["class"] == "ok", one.outcomes
    four = Attempts(tmp_path / "four", ranks=4)
    four.finished(spec(prompts, plan, grpo={"rollout": ROLLOUT}, **given))
    expected = Attempts(one.directory, ranks=1)
    assert four.learned() == expected.learned()
    for name in ("token_ids", "weight_version", "reward"):
        ours, theirs = ([each[name] for each in a.rollouts()] for a in (four, expected))
        assert ours == theirs, name
    assert losses(four) == pytest.approx(losses(expected), rel=1e-5, abs=1e-6)
    if not adapted:
        folder = "checkpoints/step-00000004"
        ours, theirs = (open_weights(a.directory / folder) for a in (four, expected))
        for name in weight_shapes(theirs.spec):
            assert relative(ours.read(name), theirs.read(name)) <= 1e-5, name


def test_asynchronous_ranks_of_lora_under_zero_3(prompts, base, tmp_path):
    """Answers are no older than allowed, none is lost, and the adapter learns."""
    given = trained(base, True)
    four = Attempts(tmp_path, ranks=4)
    grpo = {"rollout": ROLLOUT, "staleness": STALE}
    four.finished(spec(prompts, {"dp": 2, "zero": 3}, grpo=grpo, steps=6, **given))
    assert Counter(each[0] for each in four.learned()) == dict.fromkeys(range(1, 7), 8)
    assert len(set(four.learned())) == 48
    for each in four.rollouts():
        oldest = min(each.get("token_versions") or [each["weight_version"]])
        assert 0 <= each["step"] - 1 - oldest <= 2
    last = four.points()[-1]["values"]
    assert last["staleness/longest"] == 2 and last["grad_norm"] > 0
