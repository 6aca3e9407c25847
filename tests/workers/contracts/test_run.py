"""RunSpec through the door everyone uses: a JSON document in, a spec or sentences out."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workers.contracts import ParallelPlan, RunSpec, spec_problems, validation_problems

TRAIN: dict[str, Any] = {"kind": "train", "train": {"steps": 200, "seq_len": 128}}


def refusals(document: dict[str, Any]) -> list[str]:
    """`field: message -> try` of every problem, of the parts or between them."""
    try:
        result = spec_problems(RunSpec.from_dict(document))
    except ValidationError as error:
        result = validation_problems(error)
    return [f"{item.field}: {item.message} -> {item.hint}" for item in result]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "dance"}, "kind: 'dance' is not one of"),
        ({"train": None}, "train: kind train needs a body train"),
        ({"serve": {}}, "serve: kind is train but a body serve is given"),
        ({"colour": 1}, "colour: colour is not a field of this contract"),
        (
            {"train": {"seq_len": 128}},
            "train.steps: steps is missing and has no default -> Add steps",
        ),
        (
            {"train": {"steps": 0, "seq_len": 128}},
            "train.steps: 0 is out of range; it must be at least 1",
        ),
        (
            {"train": {"steps": 1, "seq_len": 8, "optimizer": {"name": "adam"}}},
            "train.optimizer.name: 'adam' is not one of",
        ),
        (
            {"train": {"steps": 1, "seq_len": 8, "checkpoint": {"sync": 1}}},
            "train.checkpoint.sync: sync is not a field",
        ),
        ({"model": "llama9"}, "model: 'llama9' is not a model preset -> Use llama"),
        ({"model": {"layers": 2}}, "model.hidden: hidden is missing"),
        (
            {
                "model": {
                    "layers": 2,
                    "hidden": 100,
                    "heads": 3,
                    "ffn": 8,
                    "vocab": 256,
                    "max_seq_len": 8,
                }
            },
            "model.hidden: hidden 100 does not divide by heads 3 -> Use hidden 99 or 102",
        ),
        (
            {"model": {"path": "a", "package": "b"}},
            "model: weights need exactly one of path and package",
        ),
        ({"plan": "automatic"}, "plan: 'automatic' is not one of 'auto'"),
        (
            {"plan": {"dp": 10**18}},
            "plan.dp: 1000000000000000000 is out of range; it must be at most 65536",
        ),
        ({"plan": {"zero": 4}}, "plan.zero: 4 is out of range; it must be at most 3"),
        (
            {"data": {"preset": "shakespeare", "path": "x"}},
            "data: data has both a preset and a path",
        ),
        (
            {"resources": {"device": "h900"}},
            "resources.device: 'h900' is not in the device catalogue -> Use h",
        ),
        # between fields
        (
            {"plan": {"dp": 2}, "resources": {"devices": 3}},
            "resources.devices: resources.devices is 3, but the plan's world size is 2",
        ),
        (
            {"plan": {"dp": 2, "global_batch_size": 3}},
            "plan.global_batch_size: 3 sequences do not divide",
        ),
        (
            {"train": {"steps": 8, "seq_len": 8, "accumulate": 4}},
            "train.accumulate: 4 contradicts the plan, which accumulates 1",
        ),
        (
            {"train": {"steps": 8, "seq_len": 8, "lr_schedule": {"warmup_steps": 9}}},
            "train.lr_schedule.warmup_steps: a warmup of 9 steps is longer",
        ),
        (
            {"model": "llama-tiny", "train": {"steps": 8, "seq_len": 1024}},
            "train.seq_len: 1024 tokens exceed the 512 rotary positions of llama-tiny",
        ),
        (
            {"model": "gpt2-124m", "train": {"steps": 8, "seq_len": 2048}},
            "train.seq_len: 2048 tokens exceed the 1024 learned positions",
        ),
    ],
)
def test_a_wrong_document_is_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    assert refusals(TRAIN) == []
    result = refusals({**TRAIN, **change})
    assert len([line for line in result if line.startswith(sentence)]) == 1, result


@pytest.mark.parametrize("kind", ["serve", "evaluate", "external", "benchmark"])
def test_bodies_with_defaults_only_may_be_left_out(kind: str) -> None:
    spec = RunSpec.from_dict({"kind": kind})
    assert spec.body == RunSpec.from_dict({"kind": kind, kind: {}}).body
    assert spec_problems(spec) == []


def test_a_script_needs_a_program() -> None:
    assert refusals({"kind": "script"}) == [
        'script.command: there is no program to run -> Use ["train.py"].'
    ]
    assert refusals({"kind": "script", "script": {"command": ["train.py", "--lr", "1"]}}) == []


def test_defaults_follow_names() -> None:
    lion = RunSpec.from_dict(
        {**TRAIN, "train": {"steps": 1, "seq_len": 8, "optimizer": {"name": "lion"}}}
    )
    assert lion.train is not None and lion.train.optimizer.lr == 1e-4
    zbv = RunSpec.from_dict(
        {**TRAIN, "plan": {"pp": 2, "dp": 3, "schedule": "zbv", "micro_batch_size": 2}}
    )
    assert isinstance(zbv.plan, ParallelPlan)
    assert (
        zbv.plan.virtual_stages,
        zbv.plan.global_batch_size,
        zbv.devices,
        zbv.has_explicit_plan,
    ) == (
        2,
        6,
        6,
        True,
    )


def test_budgets_by_exit_class() -> None:
    retries = RunSpec.from_dict({**TRAIN, "retries": {"hang": 7}}).retries
    budgets = {
        name: retries.budget(name)
        for name in ("user_error", "numerics", "hang", "lost", "preempted", "cancelled")
    }
    assert budgets == {
        "user_error": 0,
        "numerics": 1,
        "hang": 7,
        "lost": 10,
        "preempted": None,
        "cancelled": 0,
    }


def test_bias_reads_booleans_and_async_keeps_its_name() -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 8, "vocab": 256, "max_seq_len": 8}
    document = {
        **TRAIN,
        "model": {**sizes, "bias": True},
        "train": {**TRAIN["train"], "checkpoint": {"async": False}},
    }
    written = RunSpec.from_dict(document).to_dict()
    assert written["model"]["bias"] == "all"
    assert written["train"]["checkpoint"]["async"] is False


def test_words_of_hugging_face_and_openai_are_read_as_ours() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "max_seq_len": 128}
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    spec = RunSpec.from_dict({**TRAIN, "model": {**sizes, "rope": {"scaling": scaling}}})
    assert spec.shape is not None and spec.shape.rope.scaling is not None
    assert (
        spec.shape.rope.scaling.to_dict().items()
        >= {"name": "yarn", "factor": 4.0, "original_max_seq_len": 32}.items()
    )
    assert RunSpec.from_dict(spec.to_dict()) == spec
    reported = RunSpec.from_dict(
        {"kind": "generate", "generate": {"input": "a", "output": "b", "stop": "END"}}
    )
    assert reported.generate is not None and reported.generate.stop == ["END"]


@pytest.mark.parametrize(
    ("image", "ok"),
    [
        ("python:3.12", True),
        ("docker://nvcr.io/nvidia/pytorch:25.06-py3", True),
        (f"ghcr.io/a/b@sha256:{'0' * 64}", True),
        ("images/train.sif", True),
        ("/opt/images/train.sif", True),
        ("--privileged", False),
        ("a b", False),
        ("a,b", False),
        ("/opt/image", False),
        ("../train.sif", False),
        ("", False),
    ],
)
def test_images_are_references_or_files_and_never_options(image: str, ok: bool) -> None:
    spec = {"kind": "script", "script": {"command": ["a"]}, "resources": {"image": image}}
    if ok:
        assert RunSpec.from_dict(spec).resources.needs == ("images",)
        limited = {**spec, "resources": {"image": image, "cpus": 2}}
        assert RunSpec.from_dict(limited).resources.needs == ("images", "limits of images")
    else:
        with pytest.raises(ValidationError, match=r"not the name of an image|resources\.image"):
            RunSpec.from_dict(spec)


def test_an_external_run_has_no_image_or_limits() -> None:
    spec = {"kind": "external", "resources": {"image": "a", "cpus": 1.5, "memory_gb": 2}}
    fields = [item.field for item in spec_problems(RunSpec.from_dict(spec))]
    assert fields == ["resources.image", "resources.memory_gb", "resources.cpus"]
    assert RunSpec.from_dict({**spec, "resources": {"processes": 64}}).resources.needs == (
        "limits",
    )
