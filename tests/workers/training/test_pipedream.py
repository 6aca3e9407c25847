"""PipeDream equals a simulation in one process that computes with the same stale weights."""

from __future__ import annotations

import pytest
import torch

from tests.matrix import FULL
from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.training.data.run_samples import open_samples
from workers.training.objectives.token_losses import token_loss
from workers.training.optim import build_optimizer
from workers.training.parallel.batch_sharding import load_microbatch, microbatches_for
from workers.training.setup.spec_loading import accept

STEPS, FLUSH = (20, 10) if FULL else (8, 4)
MODEL = {
    "name": "tiny",
    "layers": 5,
    "hidden": 24,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 56,
    "vocab": 256,
    "max_seq_len": 64,
    "tie_embeddings": False,
}


def spec(plan, tied=False, **more):
    checkpoint = {"every_steps": FLUSH, "async": False}
    model = MODEL | {"tie_embeddings": tied}
    return make_spec(
        model,
        {"global_batch_size": 4, **plan},
        **{"steps": STEPS, "checkpoint": checkpoint, **more},
    )


def simulate(directory, *, layers, stashing, vertical_sync, tied, clip):
    """PipeDream in one process: losses and final weights. `layers`: the number in each stage.

    Copies the stale weights into the model before each pass. If `tied`, embedding and head are two
    weights that get the same gradients; those of the embedding arrive late by as many batches as
    there are stages, except at a flush. `clip` applies to the gradients of each stage, and to those
    of a tied embedding.
    """
    run = accept(spec({}))
    samples, _ = open_samples(run, cache=directory, checkpoints=directory)
    decoder = Decoder(run.model)
    initialize(decoder, layers=run.model.layers, seed=run.train.seed)
    parameters = dict(decoder.named_parameters())
    if tied:
        with torch.no_grad():
            parameters["head.weight"].copy_(parameters["embed.weight"])
    late = {}
    optimizer = build_optimizer(parameters, run.train.optimizer, shard_state=False)
    stages, ends = len(layers), torch.cumsum(torch.tensor(layers), 0).tolist()

    def get_stage(name):
        if name.startswith("blocks."):
            return next(stage for stage, end in enumerate(ends) if int(name.split(".")[1]) < end)
        return 0 if name.startswith("embed") else stages - 1

    def load_weights(weights):
        with (
            torch.no_grad(),
            torch.autograd._unsafe_preserve_version_counter(tuple(parameters.values())),
        ):
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def copy_weights():
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    versions, losses, clipped = {0: copy_weights()}, [], []
    for batch in range(1, STEPS + 1):
        flushed = (batch - 1) // FLUSH * FLUSH
        stale = {
            name: versions[
                max(flushed, batch - stages + (0 if vertical_sync else get_stage(name)))
            ][name]
            for name in parameters
        }
        load_weights(stale)
        total = 0.0
        for block in microbatches_for((batch - 1) * 4, 4, micro_batch_size=1, dp=1, rank=0):
            microbatch = load_microbatch(samples, block, torch.device("cpu"))
            loss = token_loss(decoder(microbatch.inputs), microbatch.targets)
            if not stashing:
                load_weights(versions[batch - 1])
            (loss / run.tokens_per_step).backward()
            load_weights(stale)
            total += float(loss.detach())
        losses.append(total / run.tokens_per_step)
        load_weights(versions[batch - 1])
        groups = [
            [name for name in parameters if get_stage(name) == stage] for stage in range(stages)
        ]
        if tied:
            late[batch] = parameters["embed.weight"].grad
            arrived = [
                late.pop(sent)
                for sent in list(late)
                if sent <= batch - stages or batch % FLUSH == 0
            ]
            parameters["embed.weight"].grad = parameters["head.weight"].grad = sum(
                arrived, parameters["head.weight"].grad
            )
            groups = [
                [name for name in names if name[:4] not in ("embe", "head")] for names in groups
            ]
            groups.append(["embed.weight"])  # one gradient for both
        for names in groups:
            gradients = [parameters[name].grad for name in names]
            norm = float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
            if clip is not None and norm > clip:
                clipped.append(batch)
                for gradient in gradients:
                    gradient.mul_(clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        versions[batch] = copy_weights()
    assert clip is None or clipped, "at least one step must clip"
    return losses, versions[STEPS]


CASES = [
    ({"pp": 2, "stage_layers": [3, 2]}, {}),
    ({"pp": 2, "stage_layers": [3, 2], "weight_stashing": False}, {"stashing": False}),
    ({"pp": 2, "stage_layers": [3, 2], "vertical_sync": True}, {"vertical_sync": True}),
    (
        {"pp": 4, "stage_layers": [2, 1, 1, 1], "vertical_sync": True, "weight_stashing": False},
        {"vertical_sync": True, "stashing": False},
    ),
    ({"pp": 2, "dp": 2, "stage_layers": [3, 2]}, {"tied": True}),
    ({"pp": 4, "stage_layers": [2, 1, 1, 1]}, {"tied": True, "clip": 0.5}),
]


@pytest.mark.parametrize(("plan", "options"), CASES, ids=str)
def test_equal_to_one_process_with_the_same_staleness(plan, options, train, tmp_path):
    options = {"stashing": True, "vertical_sync": False, "tied": False, "clip": None, **options}
    document = spec(
        {"schedule": "pipedream", **plan}, tied=options["tied"], clip_norm=options["clip"]
    )
    result = train(document, tmp_path / "run")
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    losses, weights = simulate(tmp_path, layers=plan["stage_layers"], **options)
    assert result.values("loss") == pytest.approx(losses, rel=1e-5)
    actual = final_weights(result, STEPS)
    assert actual.keys() == weights.keys() - ({"head.weight"} if options["tied"] else set())
    assert max(relative(actual[name], weights[name]) for name in actual) <= 1e-4
    for rank in range(len(result.outcomes)):
        assert [point["step"] for point in result.points(rank)] == list(range(1, STEPS + 1))
        assert result.values("loss", rank) == result.values("loss")


def test_bf16_follows_fp32(train, tmp_path):
    plan = {"pp": 2, "schedule": "pipedream"}
    exact = train(spec(plan, tied=True), tmp_path / "fp32")
    rounded = train(spec({**plan, "precision": "bf16"}, tied=True), tmp_path / "bf16")
    assert {outcome["class"] for outcome in rounded.outcomes} == {"ok"}, rounded.outcomes
    assert rounded.values("loss") != exact.values("loss")
    assert rounded.values("loss") == pytest.approx(exact.values("loss"), rel=5e-3)


SHORT = {"steps": 4, "clip_norm": 0.5, "checkpoint": {"every_steps": 4, "async": False}}
BF16 = {"pp": 2, "schedule": "pipedream", "stage_layers": [3, 2], "precision": "bf16"}


@pytest.fixture(scope="module")
def without_recompute(train, tmp_path_factory):
    return train(spec(BF16, tied=True, **SHORT), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputes_with_the_weights_of_the_forward_pass(
    recompute, without_recompute, train, tmp_path
):
    plain = without_recompute
    recomputed = train(spec({**BF16, "recompute": recompute}, tied=True, **SHORT), tmp_path)
    assert {outcome["class"] for outcome in recomputed.outcomes} == {"ok"}, recomputed.outcomes
    for name in ("loss", "grad_norm"):
        assert recomputed.values(name) == plain.values(name), name
    expected, actual = final_weights(plain, 4), final_weights(recomputed, 4)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_resumes_exactly_from_a_flush(train, tmp_path):
    plan = {"pp": 2, "schedule": "pipedream"}
    uninterrupted = train(spec(plan), tmp_path / "uninterrupted")
    train(spec(plan, steps=FLUSH), tmp_path / "resumed")
    resumed = train(spec(plan), tmp_path / "resumed")
    assert resumed.values("loss") == uninterrupted.values("loss")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"plan": {"tp": 2}}, "plan.tp"),
        ({"plan": {"precision": "fp16"}}, "plan.precision"),
        ({"plan": {"precision": "bf16", "weight_stashing": False}}, "plan.weight_stashing"),
        ({"plan": {"recompute": "full", "weight_stashing": False}}, "plan.recompute"),
        ({"plan": {"zero": 1, "dp": 2}}, "plan.zero"),
        ({"model": {"moe": {"experts": 4, "top_k": 1, "expert_ffn": 8}}}, "model.moe"),
    ],
    ids=str,
)
def test_refuses_options_that_stall_stages(changed, message):
    document = spec({"pp": 2, "schedule": "pipedream"})
    for part, values in changed.items():
        document[part] = {**document[part], **values}
    with pytest.raises(Exception, match=message):
        accept(document)
