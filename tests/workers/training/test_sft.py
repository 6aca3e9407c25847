"""Supervised fine-tuning: one process equals every plan, micro-batch, padding and packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.matrix import select
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from tests.workers.training.row_ranks import HandMade, run_rows
from tests.workers.training.test_combined_parallelism import MOE
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.layers.documents import Documents
from workers.training.data.rows import Row
from workers.training.parallel.batch_sharding import IGNORED, Microbatch, load_microbatch

STEPS, LENGTH = 3, 32
Example = tuple[list[int], list[float]]


def examples(count: int) -> list[Example]:
    """Random ids of 6 to 14 tokens with loss on the last few; some have other weights than 1."""
    generator = np.random.default_rng(5)
    made: list[Example] = []
    for number in range(count):
        size = int(generator.integers(6, 15))
        answer = int(generator.integers(2, size - 2))
        weight = 0.5 if number % 5 == 4 else 1.0
        made.append(
            (generator.integers(1, 250, size).tolist(), [0.0] * (size - answer) + [weight] * answer)
        )
    return made


def rows_of(groups: list[list[Example]]) -> list[Row]:
    """One row per group; the weight of an example's token is that of its prediction."""
    rows = []
    for group in groups:
        ids, weights = np.zeros(LENGTH + 1, np.int64), np.zeros(LENGTH, np.float32)
        starts, place = [], 0
        for tokens, each in group:
            starts.append(place)
            ids[place : place + len(tokens)] = tokens
            weights[place : place + len(tokens) - 1] = each[1:]
            place += len(tokens)
        rows.append(Row(ids, weights, (*starts, place)))
    return rows


def padded(made: list[Example]) -> list[Row]:
    return rows_of([[one] for one in made])


def packed(made: list[Example]) -> list[Row]:
    return rows_of([made[i : i + 2] for i in range(0, len(made), 2)])


def spec(plan: dict, *, model=None, batch: int = 8, **train):
    settings = {"objective": "sft", "steps": STEPS, "seq_len": LENGTH, "clip_norm": 0.5}
    settings |= {"eval": {"every_steps": STEPS, "batches": 1}}
    settings |= {"checkpoint": {"every_steps": STEPS, "async": False}}
    plan = {"global_batch_size": batch, **plan}
    return make_spec(model or TINY, plan, **(settings | train))


MADE = examples(8 * STEPS)
DENSE = {**TINY, "layers": 4, "tie_embeddings": True}
PLANS = [
    (TINY, {"micro_batch_size": 4}),
    (TINY, {"dp": 2, "micro_batch_size": 2, "zero": 0}),
    (TINY, {"dp": 2, "zero": 1}),
    (TINY, {"dp": 4, "zero": 3}),
    (TINY, {"tp": 2}),
    (TINY, {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 2}),
    (TINY, {"cp": 2}),
    (DENSE, {"pp": 2, "schedule": "1f1b"}),
    (DENSE, {"pp": 2, "cp": 2, "schedule": "zbv"}),
    ({**MOE, "max_seq_len": 64}, {"dp": 2, "ep": 2, "zero": 0}),
]


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    """`alone(model)`: the run of padded rows in one process, trained once."""
    done = {}

    def run(model):
        if model["name"] + str(model["layers"]) not in done:
            directory = tmp_path_factory.mktemp("alone")
            done[model["name"] + str(model["layers"])] = run_rows(
                pools, spec({}, model=model), directory, padded(MADE)
            )
        return done[model["name"] + str(model["layers"])]

    return run


def assert_equal(result, one, *, weights: float = 1e-4) -> None:
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "trained_tokens", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= weights


@pytest.mark.parametrize(("model", "plan"), select(PLANS, [0, 5, 8, 9]), ids=str)
def test_equal_to_one_process(model, plan, alone, pools, tmp_path):
    assert_equal(run_rows(pools, spec(plan, model=model), tmp_path, padded(MADE)), alone(model))


def test_packed_rows_equal_padded_rows(alone, pools, tmp_path):
    plan = {"dp": 2, "zero": 0}
    result = run_rows(pools, spec(plan, batch=4), tmp_path, packed(MADE))
    assert_equal(result, alone(TINY))


def test_the_loss_is_the_mean_over_trained_tokens(alone):
    """The first step's loss, computed from the formula."""
    parsed = alone(TINY)
    decoder = Decoder(_model())
    initialize(decoder, layers=TINY["layers"], seed=3)
    batch = load_microbatch(HandMade(padded(MADE)), Microbatch(0, 8), torch.device("cpu"))
    logits = decoder(batch.inputs, batch.documents).log_softmax(-1)
    weights = torch.from_numpy(np.stack([row.weights for row in batch.rows]))
    ids = torch.from_numpy(np.stack([row.ids for row in batch.rows]))[:, 1:]
    losses = -logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    expected = float((losses * weights).sum().detach() / weights.sum())
    assert parsed.values("loss")[0] == pytest.approx(expected, rel=1e-5)
    assert parsed.values("trained_tokens")[0] == float(weights.sum())


def test_targets_of_weight_zero_are_ignored_and_other_weights_apply():
    batch = load_microbatch(HandMade(padded(MADE)), Microbatch(3, 2, 1), torch.device("cpu"))
    assert batch.weights is not None and batch.weights[1].max() == 0.5
    assert ((batch.targets == IGNORED) == (batch.weights == 0)).all()
    assert (batch.targets[2] == IGNORED).all()
    ones = load_microbatch(HandMade(padded(MADE)), Microbatch(0, 2), torch.device("cpu"))
    assert ones.weights is None, "targets say it all"
    assert isinstance(ones.documents, Documents)


def _model():
    from workers.contracts.specs.model import ModelSpec

    return ModelSpec.model_validate(TINY)
