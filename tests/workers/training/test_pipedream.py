"""PipeDream's stages learn exactly what one process learns that computes with the same stale weights."""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.training.accept import accept
from workers.training.batches import blocks_of, tensors_of
from workers.training.data.opened import open_samples
from workers.training.objectives import token_loss
from workers.training.optim import build_optimizer

STEPS, FLUSH = 20, 10
MODEL = {
    "name": "tiny", "layers": 5, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 56, "vocab": 256, "max_seq_len": 64,
    "tie_embeddings": False,
}  # fmt: skip


def spec(plan, **more):
    checkpoint = {"every_steps": FLUSH, "async": False}
    return make_spec(MODEL, {"global_batch_size": 4, **plan}, **{"steps": STEPS, "checkpoint": checkpoint, **more})


def simulate(directory, *, layers, stashing, vertical_sync):
    """One process; `layers` of each stage. Weights are put into the model's own tensors before each pass."""
    run = accept(spec({}))
    samples, _ = open_samples(run, cache=directory, kept=directory)
    decoder = Decoder(run.model)
    initialise(decoder, layers=run.model.layers, seed=run.train.seed)
    parameters = dict(decoder.named_parameters())
    optimizer = build_optimizer(parameters, run.train.optimizer, split_state=False)
    stages, ends = len(layers), torch.cumsum(torch.tensor(layers), 0).tolist()

    def stage_of(name):
        if name.startswith("blocks."):
            return next(stage for stage, end in enumerate(ends) if int(name.split(".")[1]) < end)
        return 0 if name.startswith("embed") else stages - 1

    def put(weights):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(parameters.values())):
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def copied():
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    versions, losses = {0: copied()}, []
    for batch in range(1, STEPS + 1):
        flushed = (batch - 1) // FLUSH * FLUSH
        stale = {
            name: versions[max(flushed, batch - stages + (0 if vertical_sync else stage_of(name)))][name]
            for name in parameters
        }
        put(stale)
        total = 0.0
        for block in blocks_of((batch - 1) * 4, 4, micro_batch_size=1, dp=1, rank=0):
            inputs, targets, _ = tensors_of(samples, block, torch.device("cpu"))
            loss = token_loss(decoder(inputs), targets)
            if not stashing:
                put(versions[batch - 1])
            (loss / run.tokens_per_step).backward()
            put(stale)
            total += float(loss.detach())
        losses.append(total / run.tokens_per_step)
        put(versions[batch - 1])
        optimizer.step()
        optimizer.zero_grad()
        versions[batch] = copied()
    return losses, versions[STEPS]


CASES = [
    ({"pp": 2, "stage_layers": [3, 2]}, {}),
    ({"pp": 2, "stage_layers": [3, 2], "weight_stashing": False}, {"stashing": False}),
    ({"pp": 2, "stage_layers": [3, 2], "vertical_sync": True}, {"vertical_sync": True}),
    ({"pp": 4, "stage_layers": [2, 1, 1, 1]}, {}),
    (
        {"pp": 4, "stage_layers": [2, 1, 1, 1], "vertical_sync": True, "weight_stashing": False},
        {"vertical_sync": True, "stashing": False},
    ),
    ({"pp": 2, "dp": 2, "stage_layers": [3, 2]}, {}),
]


@pytest.mark.parametrize(("plan", "how"), CASES, ids=str)
def test_equal_to_one_process_with_the_same_staleness(plan, how, train, tmp_path):
    result = train(spec({"schedule": "pipedream", **plan}), tmp_path / "run")
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    losses, weights = simulate(
        tmp_path, layers=plan["stage_layers"], **{"stashing": True, "vertical_sync": False, **how}
    )
    assert result.values("loss") == pytest.approx(losses, rel=1e-5)
    ours = final_weights(result, STEPS)
    assert max(relative(ours[name], weights[name]) for name in weights) <= 1e-4
    for rank in range(len(result.outcomes)):
        assert [point["step"] for point in result.points(rank)] == list(range(1, STEPS + 1))
        assert result.values("loss", rank) == result.values("loss")


def test_goes_on_from_a_flush_as_if_undisturbed(train, tmp_path):
    plan = {"pp": 2, "schedule": "pipedream"}
    whole = train(spec(plan), tmp_path / "whole")
    train(spec(plan, steps=FLUSH), tmp_path / "parts")
    rest = train(spec(plan), tmp_path / "parts")
    assert rest.values("loss") == whole.values("loss")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"plan": {"tp": 2}}, "plan.tp"),
        ({"plan": {"precision": "bf16"}}, "plan.precision"),
        ({"plan": {"recompute": "full"}}, "plan.recompute"),
        ({"plan": {"zero": 1, "dp": 2}}, "plan.zero"),
        ({"train": {"clip_norm": 1.0}}, "train.clip_norm"),
        ({"model": {"tie_embeddings": True}}, "model.tie_embeddings"),
    ],
    ids=str,
)
def test_refuses_what_would_make_stages_wait(changed, says):
    document = spec({"pp": 2, "schedule": "pipedream"})
    for part, values in changed.items():
        document[part] = {**document[part], **values}
    with pytest.raises(Exception, match=says):
        accept(document)
