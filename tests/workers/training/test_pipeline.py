"""Every pipeline schedule equals one process: tied or not, uneven layers, few micro-batches."""

from __future__ import annotations

import pytest
import torch

from tests.matrix import FULL
from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.training.parallel.pipeline.stage import unwrapped_errors
from workers.training.setup.fake_ranks import describe_fake_ranks
from workers.training.setup.spec_loading import accept

STEPS = 20 if FULL else 4


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
        "eval": {"every_steps": STEPS // 2, "batches": 3},
        "checkpoint": checkpoint,
    }
    return make_spec(model, plan, **{"steps": STEPS, **settings, **train})


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    """`reference(**train)`: the run in one process, trained once."""
    runs = {}

    def run(**more):
        key = str(sorted(more.items()))
        if key not in runs:
            runs[key] = train(spec({}, **more), tmp_path_factory.mktemp("reference"))
        return runs[key]

    return run


def assert_equal(result, one):
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
        assert all(
            result.values(name, rank) == result.values(name) for rank in range(len(result.outcomes))
        ), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4
    assert min(one.values("grad_norm")) > 0.5, "every step must clip"


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
def test_equal_to_one_process(plan, more, reference, train, tmp_path):
    assert_equal(train(spec({"pp": 2, **plan}, **more), tmp_path), reference(**more))


def test_four_stages(reference, train, tmp_path):
    assert_equal(train(spec({"pp": 4, "schedule": "1f1b"}), tmp_path), reference())


def test_dropout_masks_equal_those_of_one_process(train, tmp_path):
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
        make_spec(model, {"global_batch_size": 4, **plan}, steps=STEPS) for plan in ({}, {"pp": 2})
    )
    expected = train(one, tmp_path / "one").values("loss")
    assert train(two, tmp_path / "two").values("loss") == pytest.approx(expected, rel=1e-5)


def test_saved_under_a_pipeline_resumed_without_and_back(reference, train, tmp_path):
    """A V-shaped pipeline holds a tied embedding twice; its checkpoint contains it once."""
    half = {"steps": STEPS // 2, "checkpoint": {"every_steps": STEPS // 2, "async": False}}
    train(spec({"pp": 2, "schedule": "zbv"}, **half), tmp_path)
    rest = train(spec({"dp": 2, "zero": 3}), tmp_path)
    expected = reference().values("loss")[STEPS // 2 :]
    assert [
        point["values"]["loss"] for point in rest.points() if point["attempt"] == 2
    ] == pytest.approx(expected, rel=1e-5)
    train(spec({"dp": 2, "zero": 2}, **half), tmp_path / "back")
    back = train(spec({"pp": 2, "schedule": "dualpipev"}), tmp_path / "back")
    assert [
        point["values"]["loss"] for point in back.points() if point["attempt"] == 2
    ] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", sorted({plan["schedule"] for plan, _ in TWO} | {"pipedream"}))
def test_fake_ranks_report_the_schedule(schedule):
    """Every stage runs one forward and one backward pass of each micro-batch."""
    tied = schedule != "pipedream"
    report = describe_fake_ranks(accept(spec({"pp": 2, "schedule": schedule}, tied=tied)), 2)
    actions = [
        action for row in report["schedule"] for cell in row for action in cell.split("+") if action
    ]
    stages = len(report["stage_layers"])
    for kinds in ("F", "BI"):
        passes = [action for action in actions if action[1] in kinds]
        # in PipeDream, the first stage is one batch ahead
        ahead = 4 if schedule == "pipedream" and kinds == "F" else 0
        expected = [
            f"{stage}{number + (ahead if stage == 0 else 0)}"
            for stage in range(stages)
            for number in range(4)
        ]
        assert sorted(action[0] + action[2:] for action in passes) == sorted(expected), kinds
    weights = [action for action in actions if action[1] == "W"]
    assert len(weights) == sum(action[1] == "I" for action in actions)
    assert [layer for layers in report["stage_layers"] for layer in layers] == list(range(5))


def test_an_error_of_a_stage_keeps_its_type():
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"), unwrapped_errors():
        try:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        except RuntimeError as error:
            raise RuntimeError("[Stage 0] failed to run forward:") from error
