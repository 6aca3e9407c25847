"""fp8 by torchao's layers: eager and compiled, sharded, and refused where they do not run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.workers.training.conftest import TINY, make_spec
from tests.workers.training.pool import Result
from tests.workers.training.test_compiled import CALL
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.training import fp8
from workers.training.fp8 import hopper

BATCH = {"micro_batch_size": 2, "global_batch_size": 4}
MODEL = {**TINY, "head_dim": 16}


def run(train, directory, **plan):
    more = plan.pop("train", {})
    return train(make_spec(MODEL, {**BATCH, **plan}, **more), directory)


@pytest.fixture(scope="module")
def results(train, tmp_path_factory):
    plans = {
        "bf16": {"precision": "bf16"},
        **{name: {"precision": "fp8", "fp8_recipe": name} for name in ("tensorwise", "rowwise")},
    }
    return {name: run(train, tmp_path_factory.mktemp(name), **plan) for name, plan in plans.items()}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_losses_follow_bf16(recipe, results):
    result = results[recipe]
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert result.values("loss") == pytest.approx(results["bf16"].values("loss"), rel=1e-2)
    assert result.values("loss") != results["bf16"].values("loss")


def test_compiled_and_sharded_on_two_ranks(results, pools, tmp_path):
    plan = {**BATCH, "precision": "fp8", "dp": 2, "zero": 3, "recompute": "selective"}
    spec = make_spec(MODEL, plan, compile=True, steps=2)
    outcomes = pools(2).call(CALL, spec=spec, directory=str(tmp_path))
    assert [each["class"] for each in outcomes] == ["ok", "ok"], outcomes
    result = Result(outcomes, tmp_path)
    # each rank scales its own micro-batches
    assert result.values("loss") == pytest.approx(
        results["tensorwise"].values("loss")[:2], rel=2e-3
    )


def test_every_linear_layer_of_blocks_and_no_other():
    with torch.device("meta"):
        decoder = Decoder(ModelSpec.from_dict({**MODEL, "heads": 1, "kv_heads": 1, "head_dim": 8}))
    before = {name: each.shape for name, each in decoder.named_parameters()}
    fp8.apply_torchao(decoder, "tensorwise")
    assert {name: each.shape for name, each in decoder.named_parameters()} == before
    kinds = {
        name: type(each).__name__
        for name, each in decoder.named_modules()
        if isinstance(each, torch.nn.Linear)
    }
    # products with 8 query inputs or outputs stay
    inside = {name for name in kinds if name.startswith("blocks.") and ".mlp." in name}
    assert len(inside) == 6
    assert all((kinds[name] == "Float8Linear") == (name in inside) for name in kinds)


@pytest.mark.parametrize(
    ("recipe", "capability", "remedy"),
    [
        ("tensorwise", (8, 9), None),
        ("tensorwise", (8, 0), "Use precision bf16."),
        ("block", (9, 0), None),
        ("block", (10, 0), "Use fp8_recipe tensorwise, or precision bf16."),
        ("block", (8, 0), "Use precision bf16."),
    ],
)
def test_devices_without_fp8_are_refused_with_a_remedy(recipe, capability, remedy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "device")
    monkeypatch.setattr(hopper, "usable", lambda device: capability == (9, 0))
    problem = fp8.why_not(recipe, SimpleNamespace(type="cuda"))
    assert (problem and problem[1]) == remedy
    assert fp8.why_not(recipe, torch.device("cpu")) is None
