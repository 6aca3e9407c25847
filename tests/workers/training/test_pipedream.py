"""PipeDream's stages learn exactly what one process learns that computes with the same stale
weights.
"""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.training.data.opened import open_samples
from workers.training.loop.objective import token_loss
from workers.training.optim import build_optimizer
from workers.training.parallel.batch_sharding import load_microbatch, microbatches_for
from workers.training.setup.spec_loading import accept

STEPS, FLUSH = 20, 10
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
    """One process; `layers` of each stage. Weights are put into the model's own tensors before each
    pass.

    `tied` ends are two weights here, too, which get the same gradients: the first one's come as
    many batches late as
    there are stages, but for a flush. `clip` is of each stage's own gradients, and of a tied
    embedding's.
    """
    run = accept(spec({}))
    samples, _ = open_samples(run, cache=directory, kept=directory)
    decoder = Decoder(run.model)
    initialise(decoder, layers=run.model.layers, seed=run.train.seed)
    parameters = dict(decoder.named_parameters())
    if tied:
        with torch.no_grad():
            parameters["head.weight"].copy_(parameters["embed.weight"])
    late = {}
    optimizer = build_optimizer(parameters, run.train.optimizer, shard_state=False)
    stages, ends = len(layers), torch.cumsum(torch.tensor(layers), 0).tolist()

    def stage_of(name):
        if name.startswith("blocks."):
            return next(stage for stage, end in enumerate(ends) if int(name.split(".")[1]) < end)
        return 0 if name.startswith("embed") else stages - 1

    def put(weights):
        with (
            torch.no_grad(),
            torch.autograd._unsafe_preserve_version_counter(tuple(parameters.values())),
        ):
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def copied():
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    versions, losses, clipped = {0: copied()}, [], []
    for batch in range(1, STEPS + 1):
        flushed = (batch - 1) // FLUSH * FLUSH
        stale = {
            name: versions[max(flushed, batch - stages + (0 if vertical_sync else stage_of(name)))][
                name
            ]
            for name in parameters
        }
        put(stale)
        total = 0.0
        for block in microbatches_for((batch - 1) * 4, 4, micro_batch_size=1, dp=1, rank=0):
            inputs, targets, _ = load_microbatch(samples, block, torch.device("cpu"))
            loss = token_loss(decoder(inputs), targets)
            if not stashing:
                put(versions[batch - 1])
            (loss / run.tokens_per_step).backward()
            put(stale)
            total += float(loss.detach())
        losses.append(total / run.tokens_per_step)
        put(versions[batch - 1])
        groups = [
            [name for name in parameters if stage_of(name) == stage] for stage in range(stages)
        ]
        if tied:
            late[batch] = parameters["embed.weight"].grad
            come = [
                late.pop(each)
                for each in list(late)
                if each <= batch - stages or batch % FLUSH == 0
            ]
            parameters["embed.weight"].grad = parameters["head.weight"].grad = sum(
                come, parameters["head.weight"].grad
            )
            groups = [
                [name for name in names if name[:4] not in ("embe", "head")] for names in groups
            ]
            groups.append(["embed.weight"])  # one gradient for both
        for names in groups:
            gradients = [parameters[name].grad for name in names]
            norm = float(
                torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt()
            )
            if clip is not None and norm > clip:
                clipped.append(batch)
                for gradient in gradients:
                    gradient.mul_(clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        versions[batch] = copied()
    assert clip is None or clipped, "clipping must bite for this to mean something"
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


@pytest.mark.parametrize(("plan", "how"), CASES, ids=str)
def test_equal_to_one_process_with_the_same_staleness(plan, how, train, tmp_path):
    how = {"stashing": True, "vertical_sync": False, "tied": False, "clip": None, **how}
    document = spec({"schedule": "pipedream", **plan}, tied=how["tied"], clip_norm=how["clip"])
    result = train(document, tmp_path / "run")
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    losses, weights = simulate(tmp_path, layers=plan["stage_layers"], **how)
    assert result.values("loss") == pytest.approx(losses, rel=1e-5)
    ours = final_weights(result, STEPS)
    assert ours.keys() == weights.keys() - ({"head.weight"} if how["tied"] else set())
    assert max(relative(ours[name], weights[name]) for name in ours) <= 1e-4
    for rank in range(len(result.outcomes)):
        assert [point["step"] for point in result.points(rank)] == list(range(1, STEPS + 1))
        assert result.values("loss", rank) == result.values("loss")


def test_computes_in_bf16_with_the_versions_of_fp32(train, tmp_path):
    plan = {"pp": 2, "schedule": "pipedream"}
    exact = train(spec(plan, tied=True), tmp_path / "fp32")
    rounded = train(spec({**plan, "precision": "bf16"}, tied=True), tmp_path / "bf16")
    assert {outcome["class"] for outcome in rounded.outcomes} == {"ok"}, rounded.outcomes
    assert rounded.values("loss") != exact.values("loss")
    assert rounded.values("loss") == pytest.approx(exact.values("loss"), rel=5e-3)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputes_with_the_weights_of_the_forward_pass(recompute, train, tmp_path):
    short = {"steps": 6, "clip_norm": 0.5, "checkpoint": {"every_steps": 6, "async": False}}
    plan = {"pp": 2, "schedule": "pipedream", "stage_layers": [3, 2], "precision": "bf16"}
    plain = train(spec(plan, tied=True, **short), tmp_path / "plain")
    again = train(spec({**plan, "recompute": recompute}, tied=True, **short), tmp_path / "again")
    assert {outcome["class"] for outcome in again.outcomes} == {"ok"}, again.outcomes
    for name in ("loss", "grad_norm"):
        assert again.values(name) == plain.values(name), name
    theirs, ours = final_weights(plain, 6), final_weights(again, 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_goes_on_from_a_flush_as_if_undisturbed(train, tmp_path):
    plan = {"pp": 2, "schedule": "pipedream"}
    whole = train(spec(plan), tmp_path / "whole")
    train(spec(plan, steps=FLUSH), tmp_path / "parts")
    rest = train(spec(plan), tmp_path / "parts")
    assert rest.values("loss") == whole.values("loss")


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
def test_refuses_what_would_make_stages_wait(changed, message):
    document = spec({"pp": 2, "schedule": "pipedream"})
    for part, values in changed.items():
        document[part] = {**document[part], **values}
    with pytest.raises(Exception, match=message):
        accept(document)
