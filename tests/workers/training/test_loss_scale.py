"""fp16 with dynamic loss scaling: an overflow anywhere skips the step everywhere, is told, and
survives a restart.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.workers.training.conftest import make_spec
from workers.contracts.specs.plan import LossScale
from workers.training.loop.step_context import StepContext
from workers.training.numerics.fp16_products import HalfProducts
from workers.training.numerics.loss_scale import LossScaler

BATCH = {"micro_batch_size": 2, "global_batch_size": 8}
# so large that the first steps overflow, and so eager to grow that later ones do
SCALE = {"initial": 2.0**22, "growth_interval": 3, "growth": 2.0, "backoff": 0.5}
STEPS = 14


def spec(plan=None, steps=STEPS, **more):
    whole = {**BATCH, "precision": "fp16", "loss_scale": SCALE, **(plan or {})}
    return make_spec(None, whole, steps=steps, clip_norm=0.5, **more)


def events(result, kind, rank=0):
    return [event["data"] for event in result.events(rank) if event["type"] == kind]


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return train(spec(), tmp_path_factory.mktemp("alone"))


def test_scale_moves_and_is_told(alone):
    scales, norms = alone.values("loss_scale"), alone.values("grad_norm")
    assert alone.outcomes[0]["class"] == "ok"
    skipped = [event["step"] for event in events(alone, "overflow_skipped_step")]
    assert skipped[:2] == [1, 2] and len(skipped) > 3
    assert [step for step, norm in enumerate(norms, 1) if not math.isfinite(float(norm))] == skipped
    assert [scales[step - 1] / 2 for step in skipped[:-1]] == [
        scales[step] for step in skipped[:-1]
    ]
    changes = events(alone, "loss_scale_changed")
    assert {event["reason"] for event in changes} == {"overflow", "growth"}
    assert all(
        event["new"] == event["old"] * (0.5 if event["reason"] == "overflow" else 2)
        for event in changes
    )
    assert [event["old"] for event in changes if event["step"] == 1] == [SCALE["initial"]]
    assert events(alone, "overflow_skipped_step")[0]["parameters"]
    assert "memory/optimizer_bytes" in alone.points()[-1]["values"]


PLANS = [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"pp": 2}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_ranks_skip_what_one_process_skips(plan, alone, train, tmp_path):
    result = train(spec(plan), tmp_path)
    assert [o["class"] for o in result.outcomes] == ["ok", "ok"]
    for rank in (0, 1):
        assert result.values("loss_scale", rank) == alone.values("loss_scale")
        assert result.values("loss", rank) == result.values("loss")
    assert result.values("loss") == pytest.approx(alone.values("loss"), rel=1e-5)
    assert result.values("grad_underflow/layer_1") == pytest.approx(
        alone.values("grad_underflow/layer_1"), abs=1e-3
    )
    told = events(result, "overflow_skipped_step")
    assert [event["step"] for event in told] == [
        e["step"] for e in events(alone, "overflow_skipped_step")
    ]
    assert events(result, "overflow_skipped_step", rank=1) == [], "told once"
    if plan.get("zero") == 3:
        assert {tuple(event["ranks"]) for event in told} >= {(0, 1), (0,)}, (
            "one rank's part overflows, both skip"
        )


def test_goes_on_with_its_scale_on_other_ranks(alone, train, tmp_path):
    checkpoint = {"every_steps": 8, "async": False}
    train(spec({"dp": 2, "zero": 2}, steps=8, checkpoint=checkpoint), tmp_path)
    manifest = json.loads(
        (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").read_text()
    )
    assert manifest["loss_scale"] == {"scale": alone.values("loss_scale")[8], "quiet": 0}
    result = train(spec(checkpoint=checkpoint), tmp_path)
    assert result.values("loss_scale") == alone.values("loss_scale")
    assert result.values("loss") == pytest.approx(alone.values("loss"), rel=1e-5)


def test_checkpoint_before_the_first_update(alone, train, tmp_path):
    for steps in (1, STEPS):
        result = train(
            spec({"dp": 2, "zero": 1}, steps=steps, checkpoint={"every_steps": steps}), tmp_path
        )
        assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert result.values("loss") == pytest.approx(alone.values("loss"), rel=1e-5)


def test_ends_where_no_scale_helps(train, tmp_path, monkeypatch):
    plain, calls = StepContext.loss, []

    def lost(self, logits, targets, block):
        calls.append(1)
        found = plain(self, logits, targets, block)
        return found * math.inf if len(calls) in lose else found

    monkeypatch.setattr(StepContext, "loss", lost)
    lose = {2}
    one = train(spec({"loss_scale": {"initial": 64.0}}, steps=4), tmp_path / "one")
    assert [event["step"] for event in events(one, "overflow_skipped_step")] == [1]
    assert (one.outcomes[0]["class"], one.values("loss_scale")) == ("ok", [64.0, 32.0, 32.0, 32.0])
    calls.clear()
    lose = {2, 6}
    two = train(spec({"loss_scale": {"initial": 64.0}}, steps=4), tmp_path / "two")
    assert (two.outcomes[0]["class"], two.outcomes[0]["step"]) == ("numerics", 1)
    assert "the loss is not finite at step 2" in two.outcomes[0]["reason"]
    assert "bf16" in two.outcomes[0]["reason"]
    calls.clear()
    lose = {2}
    three = train(spec({"loss_scale": {"initial": 1.0}}, steps=4), tmp_path / "three")
    assert three.outcomes[0]["class"] == "numerics", "the smallest scale is 1"


def test_scaler():
    scaler = LossScaler(LossScale(initial=8, growth_interval=2, growth=4, backoff=0.25))
    assert [scaler.updated(), scaler.updated()][1].new == 32
    assert scaler.updated() is None
    assert scaler.overflowed().new == 8
    assert scaler.updated() is None, "an overflow begins a new interval"
    again = LossScaler(scaler.spec, scaler.state)
    assert again.updated().new == 32
    assert [again.overflowed().new for _ in range(3)] == [8, 2, 1]
    assert again.exhausted


def test_products_of_halves_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(64, 512, generator=generator).half().requires_grad_() for _ in range(2)
    )
    with HalfProducts():
        found = torch.nn.functional.linear(left, right)
        found.square().sum().backward()
    with torch.no_grad():
        want = (left.float() @ right.float().T).half()
        slope = (want * 2).half()
        assert torch.equal(found, want)
        assert torch.equal(left.grad, (slope.float() @ right.float()).half())
        assert torch.equal(right.grad, (slope.float().T @ left.float()).half())


def test_attention_of_halves():
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(2, 4, 33, 16, generator=generator).half().requires_grad_() for _ in range(3)
    ]
    wide = [each.detach().float().requires_grad_() for each in given]
    with HalfProducts():
        found = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        found.float().square().sum().backward()
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    want.square().sum().backward()
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.float(), want, rtol=2e-3, atol=1e-3)
    for each, other in zip(given, wide, strict=True):
        torch.testing.assert_close(each.grad.float(), other.grad, rtol=1e-2, atol=5e-3)
