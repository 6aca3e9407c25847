# ruff: noqa: F401, F811
"""A teacher's most probable tokens, from its logits or its files, and answers of the student."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.matrix import select
from tests.workers.training.row_ranks import run_rows
from tests.workers.training.test_distillation import (
    DEEP,
    assert_equal,
    distill,
    options,
    teacher,
)
from tests.workers.training.test_sft import MADE, padded
from workers.runtime.exit_codes import UserError
from workers.training.objectives.distill.divergences import divergence, top_divergence, top_tokens
from workers.training.objectives.distill.teacher_files import TEACHER_MANIFEST
from workers.training.precompute_teacher import main, precompute
from workers.training.setup.spec_loading import accept


def test_all_tokens_are_the_full_distribution_and_few_are_renormalized():
    student, logits = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    full = divergence(student, logits, options("forward_kl", temperature=2.0))
    every = top_divergence(student, top_tokens(logits, 9), 2.0)
    assert torch.allclose(every, full, atol=1e-6)
    few = top_tokens(logits, 3)
    values, places = logits.topk(3)
    assert torch.equal(few.tokens, places)
    assert torch.allclose(few.logprobs, logits.log_softmax(-1).gather(-1, places))
    probabilities = (values / 2).softmax(-1)
    log_s = (student / 2).log_softmax(-1).gather(-1, places)
    expected = (probabilities * (probabilities.log() - log_s)).sum(-1)
    assert torch.allclose(top_divergence(student, few, 2.0), expected, atol=1e-6)


# the first shards what top tokens depend on, the vocabulary; ranks of dp and pp do not
TOP_PLANS = [
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "zero": 2},
    {"pp": 2, "cp": 2},
]


@pytest.fixture(scope="module")
def alone(pools, teacher, tmp_path_factory):
    done = {}

    def run(key, **more):
        if key not in done:
            done[key] = run_rows(
                pools, kl({}, teacher, **more), tmp_path_factory.mktemp("one"), padded(MADE)
            )
        return done[key]

    return run


def kl(plan, folder, **more):
    body = {"teacher": {"path": folder}, "loss": "forward_kl", "packing": False, **more}
    document = distill(plan, folder, model=DEEP)
    return {**document, "train": {**document["train"], "distill": body}}


@pytest.mark.parametrize("plan", select(TOP_PLANS, 1), ids=str)
def test_the_top_tokens_of_a_model_are_the_same_under_every_plan(
    plan,
    teacher,
    alone,
    pools,
    tmp_path,
):
    result = run_rows(pools, kl(plan, teacher, top_k=5), tmp_path, padded(MADE))
    assert_equal(result, alone("top", top_k=5))


GREEDY = {"on_policy": 1.0, "max_new_tokens": 6, "sampling_temperature": 0.0}
WRITING = [
    {"dp": 2, "zero": 3, "micro_batch_size": 2},
    {"pp": 2, "cp": 2},
    {"tp": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("plan", select(WRITING, 2), ids=str)
def test_the_student_answers_the_same_under_every_plan(
    plan,
    teacher,
    alone,
    pools,
    tmp_path,
):
    result = run_rows(pools, kl(plan, teacher, **GREEDY), tmp_path, padded(MADE))
    one = alone("greedy", **GREEDY)
    assert_equal(result, one)
    first = one.points()[0]["values"]
    assert first["on_policy"] == 1 and 0 < first["response_tokens"] <= 6
    assert first["trained_tokens"] == 8 * first["response_tokens"]
    assert first["generation_s"] > 0


def test_a_share_of_the_steps_is_on_policy(teacher, pools, tmp_path):
    some = kl({}, teacher, on_policy=0.5, max_new_tokens=4, sampling_temperature=1.0)
    some["train"] |= {"steps": 8, "eval": None, "checkpoint": None}
    result = run_rows(pools, some, tmp_path, padded(MADE))
    assert 0 < sum(result.values("on_policy")) < 8


LINES = [
    {
        "messages": [
            {"role": "user", "content": f"count {n}"},
            {"role": "assistant", "content": f"{n} {n + 1} {n + 2}"},
        ]
    }
    for n in range(12)
]


@pytest.fixture
def example_spec(teacher, tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    document = {**kl({}, teacher, top_k=4), "data": {"path": str(data), "format": "messages"}}
    document["train"] |= {"seq_len": 56, "checkpoint": None}
    return document


@pytest.mark.parametrize("packing", [True, False])
def test_files_give_what_the_model_gives(packing, example_spec, train, tmp_path):
    example_spec["train"]["distill"]["packing"] = packing
    model = train(example_spec, tmp_path / "model")
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(example_spec))
    files = tmp_path / "files"
    assert main(["--spec", str(spec), "--out", str(files), "--top-k", "6"]) == 0
    manifest = json.loads((files / TEACHER_MANIFEST).read_text())
    assert manifest["top_k"] == 6 and len(manifest["fingerprint"]) == 64
    example_spec["train"]["distill"]["teacher"] = {"path": str(files)}
    result = train(example_spec, tmp_path / "run")
    for each in (model, result):
        assert each.outcomes[0]["class"] == "ok", each.outcomes
    assert result.values("loss") == pytest.approx(model.values("loss"), rel=1e-5)
    assert result.values("val_loss") == pytest.approx(model.values("val_loss"), rel=1e-5)
    assert not result.points()[0]["values"].get("memory/reference_bytes")


def test_files_of_other_examples_or_fewer_tokens_are_refused(example_spec, train, tmp_path):
    files = tmp_path / "files"
    precompute(accept(example_spec), files)
    example_spec["train"]["distill"]["teacher"] = {"path": str(files)}

    def refused(**changes):
        document = json.loads(json.dumps(example_spec))
        document["train"]["distill"] |= changes
        document["train"] |= changes.get("train", {})
        document["train"]["distill"].pop("train", None)
        [outcome] = train(document, tmp_path / f"{len(list(tmp_path.iterdir()))}").outcomes
        assert outcome["class"] == "user_error", outcome
        return outcome["reason"]

    assert "has 4 tokens per position. Use top_k 4" in refused(top_k=5)
    assert "written for other examples" in refused(train_on="all")
    assert "given answers only" in refused(packing=False, on_policy=0.5)
    assert "were cut at 56 tokens" in refused(train={"seq_len": 64})
    data = Path(example_spec["data"]["path"])
    data.write_text(data.read_text().replace("count 3", "count 4"))
    assert "written for other examples" in refused()
    (files / TEACHER_MANIFEST).write_text("{}")
    assert "cannot be read" in refused()


def test_a_command_without_a_teacher_is_refused(tmp_path):
    with pytest.raises(UserError, match="only a run of distill has a teacher"):
        precompute(accept({"kind": "train", "train": {"steps": 1, "seq_len": 8}}), tmp_path)
