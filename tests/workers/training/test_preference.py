"""Preference optimization: golden values, and one process equals every plan."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.matrix import select
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from tests.workers.training.row_ranks import run_rows
from tests.workers.training.test_combined_parallelism import MOE
from workers.training.data.rows import Row, Segment
from workers.training.objectives import preference_losses as losses

# chosen, rejected, their reference, lengths: docs/finetuning.md names the sources of the formulas
CHOSEN, REJECTED = torch.tensor([-10.0, -12, -8, -20]), torch.tensor([-11.0, -11, -15, -18])
REF_CHOSEN = torch.tensor([-10.5, -11, -9, -19])
REF_REJECTED = torch.tensor([-10, -11.5, -14, -19])
TOKENS_CHOSEN, TOKENS_REJECTED = torch.tensor([5.0, 6, 4, 10]), torch.tensor([4.0, 8, 5, 6])
RATIO_W, RATIO_L = CHOSEN - REF_CHOSEN, REJECTED - REF_REJECTED
D = RATIO_W - RATIO_L
MEAN_W, MEAN_L = CHOSEN / TOKENS_CHOSEN, REJECTED / TOKENS_REJECTED
GOOD, BAD = torch.tensor([True] * 4), torch.tensor([False] * 4)


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (losses.dpo(D, beta=0.1), [0.620957, 0.770957, 0.598139, 0.798139]),
        (
            losses.cdpo(D, beta=0.1, label_smoothing=0.1),
            [0.635957, 0.755957, 0.618139, 0.778139],
        ),
        (
            losses.ipo(RATIO_W / TOKENS_CHOSEN - RATIO_L / TOKENS_REJECTED, beta=0.1),
            [21.622501, 27.344183, 20.702501, 27.73778],
        ),
        (losses.kto(RATIO_W, GOOD, z=0.3, beta=0.1), [0.495, 0.532454, 0.482507, 0.532454]),
        (losses.kto(RATIO_L, BAD, z=0.3, beta=0.1), [0.467546, 0.505, 0.467546, 0.517493]),
        (
            losses.simpo(MEAN_W, MEAN_L, beta=2.0, gamma=1.0),
            [0.474077, 2.350207, 0.313262, 0.313262],
        ),
        (
            -losses.odds_ratio(MEAN_W, MEAN_L, beta=0.1),
            [-0.036209, -0.115122, -0.028875, -0.028875],
        ),
        (losses.hinge(D, beta=0.1), [0.85, 1.15, 0.8, 1.2]),
    ],
    ids=["dpo", "cdpo", "ipo", "kto good", "kto bad", "simpo", "orpo", "hinge"],
)
def test_golden_values(computed, expected):
    assert computed.tolist() == pytest.approx(expected, abs=1e-5)


STEPS, LENGTH = 3, 48


def pair_rows(count: int, pairs: int) -> list[Row]:
    """Rows of `pairs` pairs; the answers follow a common prompt in documents of their own."""
    generator = np.random.default_rng(11)
    made = []
    for number in range(count * pairs):
        prompt = generator.integers(1, 250, 3).tolist()
        answers = [generator.integers(1, 250, int(generator.integers(3, 9))).tolist() for _ in "wl"]
        made.append((number, prompt, answers))
    return [row_of(made[i : i + pairs]) for i in range(0, len(made), pairs)]


def row_of(examples: list[tuple[int, list[int], list[list[int]]]]) -> Row:
    ids, weights = np.zeros(LENGTH + 1, np.int64), np.zeros(LENGTH, np.float32)
    starts, segments, at = [], [], 0
    for pair, prompt, answers in examples:
        for role, answer in zip(("chosen", "rejected"), answers, strict=True):
            size = len(prompt) + len(answer)
            ids[at : at + size] = prompt + answer
            weights[at + len(prompt) - 1 : at + size - 1] = 1.0
            starts.append(at)
            segments.append(Segment(at, at + size, pair, role, 0.25 * (pair % 3)))
            at += size
    return Row(ids, weights, (*starts, at), tuple(segments))


ONE, TWO = pair_rows(4 * STEPS, 1), pair_rows(2 * STEPS, 2)


def spec(plan, *, options, objective="dpo", model=None, batch=4, **train):
    settings = {"steps": STEPS, "seq_len": LENGTH, "eval": {"every_steps": STEPS, "batches": 1}}
    settings |= {"checkpoint": {"every_steps": STEPS, "async": False}, objective: options}
    plan = {"global_batch_size": batch, **plan}
    return make_spec(
        model or TINY, plan, **{"objective": objective, "clip_norm": 0.5, **settings, **train}
    )


DEEP = {**TINY, "layers": 4, "tie_embeddings": True}
ROUTED = {**MOE, "max_seq_len": 64}
PLANS = [
    ("ipo", TINY, {"micro_batch_size": 4}),
    ("dpo", TINY, {"tp": 2, "dp": 2, "zero": 2}),
    ("dpo", DEEP, {"pp": 2, "cp": 2, "schedule": "zbv"}),
    ("cdpo", TINY, {"dp": 2, "zero": 0, "micro_batch_size": 2}),
    ("dpo", TINY, {"dp": 4, "zero": 3}),
    ("hinge", TINY, {"tp": 2, "sequence_parallel": True}),
    ("simpo", TINY, {"cp": 2}),
    ("orpo", DEEP, {"pp": 2, "schedule": "1f1b"}),
    ("dpo", ROUTED, {"dp": 2, "ep": 2, "zero": 2}),
    ("dpo", TINY, {"tp": 4}),
    ("dpo", TINY, {"cp": 4, "recompute": "full"}),
]


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    """`alone(loss, model)`: the run in one process, trained once."""
    done = {}

    def run(loss, model):
        key = loss, model["name"], model["layers"]
        if key not in done:
            made = spec({}, options={"loss": loss}, model=model)
            done[key] = run_rows(pools, made, tmp_path_factory.mktemp("alone"), ONE)
        return done[key]

    return run


def assert_equal(result, one, names):
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss", *names):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5, abs=1e-6), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4


@pytest.mark.parametrize(("loss", "model", "plan"), select(PLANS, [0, 1, 2]), ids=str)
def test_equal_to_one_process(loss, model, plan, alone, pools, tmp_path):
    made = spec(plan, options={"loss": loss}, model=model)
    result = run_rows(pools, made, tmp_path, ONE)
    assert_equal(result, alone(loss, model), ("dpo/margin", "dpo/accuracy", "dpo/logp_chosen"))


def test_the_first_step_has_the_loss_ln_2_and_no_margin(alone):
    first = alone("dpo", TINY).points()[0]["values"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-6)
    assert first["memory/reference_bytes"] == first["memory/params_bytes"]
    assert alone("dpo", TINY).values("loss")[-1] < math.log(2), "the reference does not learn"


def test_a_resumed_run_has_the_same_reference(alone, pools, tmp_path):
    half = {"steps": 2, "checkpoint": {"every_steps": 2, "async": False}, "eval": None}
    run_rows(pools, spec({}, options={}, **half), tmp_path, ONE)
    rest = run_rows(pools, spec({"dp": 2, "zero": 3}, options={}), tmp_path, ONE)
    resumed = [p["values"]["loss"] for p in rest.points() if p["attempt"] == 2]
    assert resumed == pytest.approx(alone("dpo", TINY).values("loss")[2:], rel=1e-5)


def test_pairs_that_share_a_row_have_the_losses_of_pairs_in_rows_of_their_own(pools, tmp_path):
    alone = run_rows(pools, spec({}, options={}), tmp_path / "one", pair_rows(4 * STEPS, 1))
    packed = run_rows(
        pools, spec({"cp": 2}, options={}, batch=2), tmp_path / "two", pair_rows(2 * STEPS, 2)
    )
    assert_equal(packed, alone, ("dpo/margin", "dpo/reward_chosen"))
