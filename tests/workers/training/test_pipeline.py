"""Every schedule learns exactly what one process learns: tied or not, uneven layers, few
micro-batches, any ZeRO.
"""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.training.parallel.pipeline.stage import unwrapped_errors
from workers.training.setup.fake_ranks import describe_fake_ranks
from workers.training.setup.spec_loading import accept

STEPS = 20


def spec(plan, *, tied=True, batch=4, **train):
    model = {
        "name": "tiny",
        "layers": 5,
        "hidden": 24,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 56,
        "vocab": 256,
        "max_seq_len": 64,
        "tie_embeddings": tied,
    }
    plan = {"global_batch_size": batch, **plan}
    checkpoint = {"every_steps": STEPS, "async": False}
    settings = {
        "seq_len": 13,
        "clip_norm": 0.5,
        "eval": {"every_steps": 10, "batches": 3},
        "checkpoint": checkpoint,
    }
    return make_spec(model, plan, **{"steps": STEPS, **settings, **train})


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    kept = {}

    def run(**more):
        key = str(sorted(more.items()))
        if key not in kept:
            kept[key] = train(spec({}, **more), tmp_path_factory.mktemp("alone"))
        return kept[key]

    return run


def assert_equal(result, one):
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
        assert all(
            result.values(name, rank) == result.values(name) for rank in range(len(result.outcomes))
        ), name
    theirs, ours = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(ours[name], theirs[name]) for name in theirs) <= 1e-4
    assert min(one.values("grad_norm")) > 0.5, "clipping must bite for this test to mean something"


TWO = [
    ({"schedule": "naive"}, {}),
    ({"schedule": "gpipe"}, {"batch": 3}),
    ({"schedule": "1f1b", "stage_layers": [4, 1]}, {}),
    ({"schedule": "1f1b"}, {"batch": 1}),
    ({"schedule": "interleaved_1f1b", "virtual_stages": 2}, {"tied": False}),
    ({"schedule": "zb1p"}, {}),
    ({"schedule": "zbv"}, {}),
    ({"schedule": "zbv", "stage_layers": [1, 2, 2, 0]}, {"tied": False}),
    ({"schedule": "dualpipev"}, {}),
]


@pytest.mark.parametrize(("plan", "more"), TWO, ids=str)
def test_losses_of_one_process(plan, more, alone, train, tmp_path):
    assert_equal(train(spec({"pp": 2, **plan}, **more), tmp_path), alone(**more))


def test_four_stages(alone, train, tmp_path):
    assert_equal(train(spec({"pp": 4, "schedule": "1f1b"}), tmp_path), alone())


def test_dropout_masks_are_those_of_one_process(train, tmp_path):
    gpt = {
        "bias": "all",
        "norm": "layernorm",
        "position": "learned",
        "gated_mlp": False,
        "dropout": 0.1,
    }
    model = {
        "name": "gpt",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "ffn": 80,
        "vocab": 256,
        "max_seq_len": 64,
        **gpt,
    }
    one, two = (
        make_spec(model, {"global_batch_size": 4, **plan}, steps=8) for plan in ({}, {"pp": 2})
    )
    alone = train(one, tmp_path / "one")
    assert train(two, tmp_path / "two").values("loss") == pytest.approx(
        alone.values("loss"), rel=1e-5
    )


def test_saved_under_a_pipeline_resumed_without_and_back(alone, train, tmp_path):
    """A folded pipeline with a tied embedding holds it twice; whoever reads the checkpoint finds
    one.
    """
    half = {"steps": STEPS // 2, "checkpoint": {"every_steps": STEPS // 2, "async": False}}
    train(spec({"pp": 2, "schedule": "zbv"}, **half), tmp_path)
    rest = train(spec({"dp": 2, "zero": 3}), tmp_path)
    expected = alone().values("loss")[STEPS // 2 :]
    assert [
        point["values"]["loss"] for point in rest.points() if point["attempt"] == 2
    ] == pytest.approx(expected, rel=1e-5)
    train(spec({"dp": 2, "zero": 2}, **half), tmp_path / "back")
    back = train(spec({"pp": 2, "schedule": "dualpipev"}), tmp_path / "back")
    assert [
        point["values"]["loss"] for point in back.points() if point["attempt"] == 2
    ] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", sorted({plan["schedule"] for plan, _ in TWO} | {"pipedream"}))
def test_fake_ranks_show_the_schedule(schedule):
    """Every stage passes every micro-batch forward and back, once, in an order without gaps in its
    own data.
    """
    tied = schedule != "pipedream"
    told = describe_fake_ranks(accept(spec({"pp": 2, "schedule": schedule}, tied=tied)), 2)
    done = [
        each for row in told["schedule"] for action in row for each in action.split("+") if each
    ]
    stages = len(told["stage_layers"])
    for kinds in ("F", "BI"):
        passes = [each for each in done if each[1] in kinds]
        # the first stage is a batch ahead
        ahead = 4 if schedule == "pipedream" and kinds == "F" else 0
        wanted = [
            f"{stage}{number + (ahead if stage == 0 else 0)}"
            for stage in range(stages)
            for number in range(4)
        ]
        assert sorted(each[0] + each[2:] for each in passes) == sorted(wanted), kinds
    weights = [each for each in done if each[1] == "W"]
    assert len(weights) == sum(each[1] == "I" for each in done)
    assert [layer for layers in told["stage_layers"] for layer in layers] == list(range(5))


def test_what_a_stage_raises_keeps_its_kind():
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"), unwrapped_errors():
        try:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        except RuntimeError as error:
            raise RuntimeError("[Stage 0] failed to run forward:") from error
