"""Options of fine-tuning objectives and adapters: defaults, what a method excludes, old keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from workers.contracts.base import validation_problems
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.finetuning.objectives import DpoBody, SftBody
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.specs.training_support import engine_problems


def spec(**train: Any) -> dict[str, Any]:
    return {"kind": "train", "train": {"steps": 2, "seq_len": 16, **train}}


def refused(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as error:
        RunSpec.from_dict(document)
    return [str(item) for item in validation_problems(error.value)]


def test_an_objective_has_its_own_options_with_defaults():
    body = RunSpec.from_dict(spec(objective="sft")).train
    assert body is not None and body.sft == SftBody() and body.dpo is None
    body = RunSpec.from_dict(spec(objective="dpo", dpo={"loss": "simpo", "gamma": 1})).train
    assert body is not None and body.dpo == DpoBody(loss="simpo", gamma=1)
    assert not body.dpo.needs_reference


def test_options_of_another_objective_are_refused():
    [message] = refused(spec(objective="sft", dpo={}))
    assert message == (
        "train.dpo: objective is sft but options of dpo are given. "
        "Use objective dpo, or remove dpo."
    )
    [message] = refused(spec(objective="distill"))
    assert "distillation needs a teacher" in message


def test_scale_and_storage_follow_the_method():
    assert AdapterSpec().scale == 2.0 and AdapterSpec().size == 16
    assert math.isclose(AdapterSpec(method="rslora", rank=16, alpha=8).scale, 2.0)
    qlora = AdapterSpec(method="qlora")
    assert qlora.storage == "nf4" and qlora.double_quantized
    assert AdapterSpec(method="prefix").size == 20 and AdapterSpec(method="ia3").size == 0
    old = AdapterSpec.from_dict({"name": "qlora", "rank": 4})
    assert old.method == "qlora" and "name" not in old.to_dict()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"method": "bitfit", "rank": 4}, "bitfit has no rank"),
        ({"method": "prefix", "alpha": 4}, "prefix has no alpha"),
        ({"method": "lora", "init": "random"}, "lora has no virtual tokens"),
        ({"method": "lora", "double_quant": True}, "double_quant needs weights in 4 bits"),
    ],
)
def test_options_that_a_method_does_not_have_are_refused(adapter, message):
    [first] = refused(spec(adapter=adapter))
    assert message in first


def test_pretraining_refuses_example_formats_and_the_engine_frozen_pipedream():
    parsed = RunSpec.from_dict(
        {
            **spec(freeze=["embed*"]),
            "data": {"path": "a.jsonl", "format": "messages"},
            "plan": {"pp": 2, "schedule": "pipedream"},
        }
    )
    [first] = spec_problems(parsed)
    assert first.field == "data.format" and "for fine-tuning" in first.message
    assert [item.field for item in engine_problems(parsed)] == ["plan.schedule"]


@pytest.mark.parametrize(
    ("train", "field", "message"),
    [
        ({"freeze": ["blocks.0.*", "layers.*"]}, "train.freeze.1", "layers.* does not match any"),
        ({"freeze": ["*"]}, "train.freeze", "all 47 parameters are frozen"),
        ({"adapter": {}}, "train.adapter", "train.init_from is not set"),
        (
            {"adapter": {"modules_to_save": ["lm_head"]}, "init_from": {"path": "a"}},
            "train.adapter.modules_to_save.0",
            "llama-tiny has no module lm_head",
        ),
        (
            {"adapter": {"method": "qlora"}, "init_from": {"path": "a"}},
            "train.adapter.quantize",
            "mlp.down has 344 inputs",
        ),
        (
            {"optimizer": {"lora_plus_ratio": 4}},
            "train.optimizer.lora_plus_ratio",
            "this run has no such",
        ),
        (
            {"adapter": {}, "init_from": {"path": "a"}, "freeze": ["embed.*"]},
            "train.freeze",
            "already freezes",
        ),
    ],
)
def test_frozen_weights_and_adapters_that_cannot_be_are_refused(train, field, message):
    problems = spec_problems(RunSpec.from_dict({**spec(**train), "model": "llama-tiny"}))
    assert [each.field for each in problems] == [field]
    assert message in problems[0].message
