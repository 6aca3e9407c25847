"""KTO: the point of comparison of a batch, and one process equals every plan."""

from __future__ import annotations

import numpy as np
import pytest

from tests.matrix import select
from tests.workers.training.conftest import TINY
from tests.workers.training.row_ranks import HandMade, run_rows
from tests.workers.training.test_preference import DEEP, LENGTH, ROUTED, STEPS, assert_equal, spec
from workers.training.data.mismatched_pairs import MismatchedPairs
from workers.training.data.rows import Row, Segment


def answer_rows(count: int, per_row: int) -> list[Row]:
    """Rows of `per_row` labelled answers, every third of them bad."""
    generator = np.random.default_rng(5)
    rows = []
    for first in range(0, count * per_row, per_row):
        ids, weights = np.zeros(LENGTH + 1, np.int64), np.zeros(LENGTH, np.float32)
        starts, segments, at = [], [], 0
        for number in range(first, first + per_row):
            prompt, size = 3, 3 + int(generator.integers(3, 9))
            ids[at : at + size] = generator.integers(1, 250, size)
            weights[at + prompt - 1 : at + size - 1] = 1.0
            starts.append(at)
            role = "good" if number % 3 else "bad"
            segments.append(Segment(at, at + size, number, role))
            at += size
        rows.append(Row(ids, weights, (*starts, at), tuple(segments)))
    return rows


ONE, TWO = answer_rows(4 * STEPS, 1), answer_rows(2 * STEPS, 2)
KTO = {"loss": "kto", "beta": 0.5, "desirable_weight": 1.5}
PLANS = [
    (DEEP, {"pp": 2, "cp": 2}),
    (TINY, {"dp": 2, "tp": 2, "zero": 3}),
    (TINY, {"micro_batch_size": 4}),
    (TINY, {"tp": 2, "sequence_parallel": True}),
    (TINY, {"dp": 4, "zero": 0}),
    (ROUTED, {"dp": 2, "ep": 2, "zero": 0}),
]


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    done = {}

    def run(model):
        key = model["name"], model["layers"]
        if key not in done:
            made = spec({}, options=KTO, model=model)
            done[key] = run_rows(pools, made, tmp_path_factory.mktemp("one"), ONE)
        return done[key]

    return run


NAMES = ("dpo/logp_chosen", "dpo/logp_rejected")


def assert_same(result, one):
    assert_equal(result, one, NAMES)
    for name in ("dpo/kl", "dpo/margin", "val_dpo/kl"):  # of log-probabilities near -50
        assert result.values(name) == pytest.approx(one.values(name), abs=2e-5), name


@pytest.mark.parametrize(("model", "plan"), select(PLANS, 2), ids=str)
def test_equal_to_one_process(model, plan, alone, pools, tmp_path):
    made = spec(plan, options=KTO, model=model)
    assert_same(run_rows(pools, made, tmp_path, ONE), alone(model))


def test_answers_that_share_a_row_have_the_losses_of_rows_of_their_own(alone, pools, tmp_path):
    packed = run_rows(pools, spec({}, options=KTO, batch=2), tmp_path, TWO)
    assert_same(packed, alone(TINY))


def test_policy_and_reference_are_equal_in_the_first_step(alone):
    first, *_, last = (point["values"] for point in alone(TINY).points())
    good, bad = (sum(r.segments[0].role == kind for r in ONE[:4]) for kind in ("good", "bad"))
    assert first["loss"] == pytest.approx(0.5 * (1.5 * good + bad) / 4, abs=1e-6)
    assert first["dpo/kl"] == pytest.approx(0, abs=1e-6)
    assert last["val_loss"] < first["loss"], "of the same answers"


def test_every_prompt_has_the_answer_before_it():
    shifted = MismatchedPairs(HandMade(ONE), first=4, count=4)
    assert shifted.windows == 4
    for index in range(4):
        prompt, answer = ONE[4 + index], ONE[4 + (index - 1) % 4]
        size = answer.segments[0].stop
        expected = [*prompt.ids[:3], *answer.ids[3:size]]
        row = shifted.row(index)
        assert row.ids[:size].tolist() == expected
        assert row.weights.tolist() == answer.weights.tolist()
        assert row.segments == (Segment(0, size, index, prompt.segments[0].role),)
    # two answers a row are the same batch
    packed = MismatchedPairs(HandMade(TWO), first=2, count=2)
    assert [packed.row(i).ids.tolist() for i in range(4)] == [
        shifted.row(i).ids.tolist() for i in range(4)
    ]
