"""`train.quantize_aware`: validated as the model that is kept in few bits, alike under every plan,
refused with a message.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.matrix import FULL
from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.training_support import engine_problems
from workers.inference.quantize.linears import round_groups
from workers.inference.quantize.replace_linears import named_linears
from workers.models.decoder import Decoder
from workers.models.weights.manifest import step_folder
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model
from workers.training.data.run_samples import open_samples
from workers.training.objectives.token_losses import token_loss
from workers.training.parallel.batch_sharding import Microbatch, load_microbatch
from workers.training.setup.spec_loading import accept

STEPS = 8 if FULL else 4  # few: a weight that falls to another code by rounding ends parity
MODEL = {
    "name": "rounded",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 64,
    "vocab": 257,
    "max_seq_len": 32,
}
MOE = {**MODEL, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32, "aux_loss": 0.01}}


def spec(plan, model=MODEL, kind="int4", **more):
    plan = {"micro_batch_size": 2, "global_batch_size": 4, **plan}
    last = {"every_steps": STEPS, "async": False}
    # a last bit may turn one of a weight's codes: Adam then moves it otherwise, by its rate
    settings = {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-4}, "checkpoint": last}
    settings |= {"eval": {"every_steps": STEPS, "batches": 2}, "quantize_aware": kind}
    return make_spec(model, plan, **(settings | more))


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return train(spec({}), tmp_path_factory.mktemp("alone"))


def test_validation_is_that_of_the_quantized_model(alone):
    """The checkpoint has full weights; in four bits they give the run's validation loss."""
    [plan] = [each["data"] for each in alone.events() if each["type"] == "plan_resolved"]
    assert (plan["quantize_aware"], plan["group"]) == ("int4", 32)
    run = accept(spec({}))
    _, held_out = open_samples(run, cache=alone.directory / "cache", checkpoints=alone.directory)
    weights = open_weights(alone.directory / "checkpoints" / step_folder(STEPS))
    decoder = Decoder(weights.spec).eval()
    fill_model(decoder, weights)
    batch = load_microbatch(held_out, Microbatch(0, 8), torch.device("cpu"))
    inputs, targets = batch.inputs, batch.targets
    losses = []
    with torch.no_grad():
        losses.append(float(token_loss(decoder(inputs), targets)) / targets.numel())
        for _, module in named_linears(decoder):
            codes, scales, zeros = round_groups(module.weight, 32)
            spread = (each.float().repeat_interleave(32, 0) for each in (zeros, scales))
            module.weight.copy_(((codes.float() - next(spread)) * next(spread)).T)
        losses.append(float(token_loss(decoder(inputs), targets)) / targets.numel())
    assert losses[1] == pytest.approx(alone.values("val_loss")[-1], rel=1e-6)
    assert abs(losses[0] / losses[1] - 1) > 1e-5, (
        "rounding must matter for this test to mean something"
    )


PLANS = [
    {"dp": 2, "zero": 1, "recompute": "selective"},
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "schedule": "zb1p", "recompute": "full", "micro_batch_size": 1},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_alike_under_every_plan(plan, alone, train, tmp_path):
    result = train(spec(plan), tmp_path)
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(alone.values(name), rel=1e-5), name
    theirs, ours = final_weights(alone, STEPS), final_weights(result, STEPS)
    assert max(relative(ours[name], theirs[name]) for name in theirs) <= 1e-4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_experts_and_16_bits(precision, train, tmp_path):
    """A dealt expert rounds as one at home does, and a cast copy is rounded like a full weight."""
    short = {"steps": 3, "eval": None, "checkpoint": None, "model": MOE, "kind": "int8"}
    one = train(spec({}, **short), tmp_path / "one")
    two = train(spec({"dp": 2, "ep": 2, "precision": precision}, **short), tmp_path / "two")
    assert {outcome["class"] for outcome in two.outcomes} == {"ok"}, two.outcomes
    assert two.values("loss") == pytest.approx(one.values("loss"), rel=5e-3)


@pytest.mark.parametrize(
    ("plan", "more", "message"),
    [
        ({"tp": 2}, {"kind": "int8"}, "over all inputs, which tp 2 shards.*Use int4, or tp 1"),
        ({"tp": 4}, {}, "tp 4 splits 64 inputs within a group.*Use tp 2"),
        ({"precision": "fp8"}, {}, "their own tiles.*precision bf16"),
        ({}, {"compile": True}, "compile false"),
        ({"pp": 2, "schedule": "pipedream"}, {}, "versions of weights.*schedule 1f1b"),
    ],
    ids=str,
)
def test_refused_where_weights_are_not_rounded_as_they_are_stored(plan, more, message):
    problems = engine_problems(RunSpec.from_dict(spec(plan, **more)))
    [results] = [each for each in problems if each.field == "train.quantize_aware"]
    assert re.search(message, str(results)), results
