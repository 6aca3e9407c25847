"""Distillation: golden values of GKD, and one process equals every plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.matrix import select
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from tests.workers.training.row_ranks import run_rows
from tests.workers.training.test_preference import ROUTED
from tests.workers.training.test_sft import MADE, STEPS, packed, padded, spec
from workers.contracts.specs.finetuning.objectives import DistillBody
from workers.training.data.pretrained_tokenizer import copy_tokenizer, resolve_data
from workers.training.objectives.distill.divergences import divergence
from workers.training.setup.spec_loading import accept

ROOT = Path(__file__).resolve().parents[3]


def options(loss: str, **more) -> DistillBody:
    return DistillBody.model_validate({"teacher": {"path": "x"}, "loss": loss, **more})


@pytest.mark.parametrize(
    ("loss", "expected"), [("forward_kl", 0.29824), ("jsd", 0.066558), ("reverse_kl", 0.264406)]
)
def test_golden_values(loss, expected):
    numbers = torch.arange(24.0)
    student, teacher = (each.view(2, 3, 4) for each in (numbers.sin(), numbers.cos()))
    trained = torch.tensor([[False, True, True], [True, False, True]])
    losses = divergence(student, teacher, options(loss))
    assert float(losses[trained].mean()) == pytest.approx(expected, abs=1e-5)
    assert float(divergence(teacher, teacher, options(loss)).abs().max()) <= 1e-6


def test_a_student_from_random_weights_reads_with_its_teachers_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    example = json.loads((ROOT / "examples/finetune_distill.json").read_text())
    teacher, checkpoints = tmp_path / "teacher", tmp_path / "checkpoints"
    for folder in (teacher, checkpoints):
        folder.mkdir()
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(teacher / "tokenizer.json"))
    example["train"]["distill"]["teacher"] = {"path": str(teacher)}
    run = accept(example)
    copy_tokenizer(run, checkpoints=checkpoints)
    assert resolve_data(run, checkpoints=checkpoints).tokenizer == str(
        checkpoints / "tokenizer.json"
    )
    # stored tokens of a teacher come without its tokenizer
    (checkpoints / "tokenizer.json").unlink()
    (teacher / "teacher.json").write_text("{}")
    copy_tokenizer(run, checkpoints=checkpoints)
    assert resolve_data(run, checkpoints=checkpoints).tokenizer is None


def test_temperature_divides_logits():
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    one = divergence(student / 2, teacher / 2, options("jsd", beta=0.3))
    two = divergence(student, teacher, options("jsd", beta=0.3, temperature=2.0))
    assert torch.allclose(one, two)


TEACHER = {**TINY, "name": "teacher", "layers": 4, "hidden": 48}
DEEP = {**TINY, "layers": 4, "tie_embeddings": True}
PLANS = [
    (TINY, {"tp": 2, "dp": 2, "zero": 2}),
    (DEEP, {"pp": 2, "cp": 2, "schedule": "zbv"}),
    (TINY, {"micro_batch_size": 4}),
    (TINY, {"dp": 4, "zero": 3}),
    (TINY, {"tp": 2, "sequence_parallel": True}),
    (ROUTED, {"dp": 2, "ep": 2, "zero": 0}),
]


@pytest.fixture(scope="module")
def teacher(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    checkpoint = {"every_steps": 1, "async": False}
    train(make_spec(TEACHER, {}, steps=1, seed=8, checkpoint=checkpoint), folder)
    return str(folder / "checkpoints")


def distill(plan, teacher, *, model=TINY, loss="jsd", **more):
    body = {"teacher": {"path": teacher}, "loss": loss, "temperature": 2.0}
    return spec(plan, model=model, objective="distill", distill=body, **more)


@pytest.fixture(scope="module")
def alone(pools, teacher, tmp_path_factory):
    done = {}

    def run(model):
        key = model["name"], model["layers"]
        if key not in done:
            made = distill({}, teacher, model=model)
            directory = tmp_path_factory.mktemp("alone")
            done[key] = run_rows(pools, made, directory, padded(MADE))
        return done[key]

    return run


def assert_equal(result, one):
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "trained_tokens", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4


@pytest.mark.parametrize(("model", "plan"), select(PLANS, 2), ids=str)
def test_equal_to_one_process(model, plan, teacher, alone, pools, tmp_path):
    made = distill(plan, teacher, model=model)
    assert_equal(run_rows(pools, made, tmp_path, padded(MADE)), alone(model))


def test_packed_rows_equal_padded_rows(teacher, alone, pools, tmp_path):
    assert_equal(
        run_rows(pools, distill({}, teacher, batch=4), tmp_path, packed(MADE)), alone(TINY)
    )


def test_a_teacher_with_another_vocabulary_is_refused(teacher, pools, tmp_path):
    made = distill({}, teacher, model={**TINY, "vocab": 300})
    [outcome] = run_rows(pools, made, tmp_path, padded(MADE)).outcomes
    assert outcome["class"] == "user_error"
    assert (
        "train.distill.teacher: its vocabulary has 256 tokens, the model's 300"
        in (outcome["reason"])
    )
