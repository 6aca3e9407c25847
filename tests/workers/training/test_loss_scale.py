"""fp16 with dynamic loss scaling: an overflow on one rank skips the step on all; scales resume."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.workers.training.conftest import make_spec
from webui.presentation.event_messages import describe
from workers.contracts.specs.plan import LossScale
from workers.training.loop.step_context import StepContext
from workers.training.numerics.fp16_matmul import Fp16MatmulMode
from workers.training.numerics.loss_scale import LossScaler

BATCH = {"micro_batch_size": 2, "global_batch_size": 8}
# a large initial scale makes the first steps overflow, frequent growth makes later steps overflow
SCALE = {"initial": 2.0**22, "growth_interval": 3, "growth": 2.0, "backoff": 0.5}
STEPS = 14


def spec(plan=None, steps=STEPS, **more):
    full_plan = {**BATCH, "precision": "fp16", "loss_scale": SCALE, **(plan or {})}
    return make_spec(None, full_plan, steps=steps, clip_norm=0.5, **more)


def events(result, kind, rank=0):
    return [event["data"] for event in result.events(rank) if event["type"] == kind]


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    return train(spec(), tmp_path_factory.mktemp("alone"))


def test_scale_changes_are_reported(reference):
    scales, norms = reference.values("loss_scale"), reference.values("grad_norm")
    assert reference.outcomes[0]["class"] == "ok"
    skipped = [event["step"] for event in events(reference, "overflow_skipped_step")]
    assert skipped[:2] == [1, 2] and len(skipped) > 3
    assert [step for step, norm in enumerate(norms, 1) if not math.isfinite(float(norm))] == skipped
    assert [scales[step - 1] / 2 for step in skipped[:-1]] == [
        scales[step] for step in skipped[:-1]
    ]
    changes = events(reference, "loss_scale_changed")
    assert {event["reason"] for event in changes} == {"overflow", "growth"}
    assert all(
        event["new"] == event["old"] * (0.5 if event["reason"] == "overflow" else 2)
        for event in changes
    )
    assert [event["old"] for event in changes if event["step"] == 1] == [SCALE["initial"]]
    assert events(reference, "overflow_skipped_step")[0]["parameters"]
    assert "memory/optimizer_bytes" in reference.points()[-1]["values"]


def test_many_skips_in_a_row_are_a_warning_on_the_page(train, tmp_path):
    huge = {**SCALE, "initial": 1e12}
    result = train(spec({"loss_scale": huge}, steps=10), tmp_path)
    [warning] = events(result, "learning_warning")
    assert (warning["step"], warning["kind"], warning["now"]) == (8, "skipped_updates", 8)
    sentence = describe("learning_warning", warning, 0)
    assert "overflowed in 8 steps in a row" in sentence and "plan.loss_scale.initial" in sentence


PLANS = [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"pp": 2}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_ranks_skip_what_one_process_skips(plan, reference, train, tmp_path):
    result = train(spec(plan), tmp_path)
    assert [o["class"] for o in result.outcomes] == ["ok", "ok"]
    for rank in (0, 1):
        assert result.values("loss_scale", rank) == reference.values("loss_scale")
        assert result.values("loss", rank) == result.values("loss")
    assert result.values("loss") == pytest.approx(reference.values("loss"), rel=1e-5)
    assert result.values("grad_underflow/layer_1") == pytest.approx(
        reference.values("grad_underflow/layer_1"), abs=1e-3
    )
    skipped = events(result, "overflow_skipped_step")
    assert [event["step"] for event in skipped] == [
        event["step"] for event in events(reference, "overflow_skipped_step")
    ]
    assert events(result, "overflow_skipped_step", rank=1) == [], "one rank reports it"
    if plan.get("zero") == 3:
        assert {tuple(event["ranks"]) for event in skipped} >= {(0, 1), (0,)}, (
            "one rank's shard overflows, both ranks skip"
        )


def test_resumes_with_its_scale_on_another_number_of_ranks(reference, train, tmp_path):
    checkpoint = {"every_steps": 8, "async": False}
    train(spec({"dp": 2, "zero": 2}, steps=8, checkpoint=checkpoint), tmp_path)
    manifest = json.loads(
        (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").read_text()
    )
    state = manifest["loss_scale"]
    assert (state["scale"], state["quiet"]) == (reference.values("loss_scale")[8], 0)
    assert state["skipped"] == reference.values("skipped_updates")[7]
    assert state["updates"] + state["skipped"] == 8
    result = train(spec(checkpoint=checkpoint), tmp_path)
    assert result.values("loss_scale") == reference.values("loss_scale")
    assert result.values("loss") == pytest.approx(reference.values("loss"), rel=1e-5)


def test_checkpoint_before_the_first_update(reference, train, tmp_path):
    for steps in (1, STEPS):
        result = train(
            spec({"dp": 2, "zero": 1}, steps=steps, checkpoint={"every_steps": steps}), tmp_path
        )
        expected = "numerics" if steps == 1 else "ok"
        assert result.outcomes[0]["class"] == expected, result.outcomes
    assert result.values("loss") == pytest.approx(reference.values("loss"), rel=1e-5)


def test_a_run_without_an_update_ends_as_numerics(train, tmp_path):
    result = train(spec({"loss_scale": {"initial": 2.0**60}}, steps=3), tmp_path)
    outcome = result.outcomes[0]
    assert outcome["class"] == "numerics" and "no update was made in 3 steps" in outcome["reason"]
    assert result.values("skipped_updates") == [1.0, 2.0, 3.0]


def test_stops_if_no_scale_helps(train, tmp_path, monkeypatch):
    plain, calls = StepContext.loss, []

    def inject_infinity(self, logits, batch, **more):
        calls.append(1)
        value = plain(self, logits, batch, **more)
        return value * math.inf if len(calls) in infinite_calls else value

    monkeypatch.setattr(StepContext, "loss", inject_infinity)
    infinite_calls = {2}
    one = train(spec({"loss_scale": {"initial": 64.0}}, steps=4), tmp_path / "one")
    assert [event["step"] for event in events(one, "overflow_skipped_step")] == [1]
    assert (one.outcomes[0]["class"], one.values("loss_scale")) == ("ok", [64.0, 32.0, 32.0, 32.0])
    calls.clear()
    infinite_calls = {2, 6}
    two = train(spec({"loss_scale": {"initial": 64.0}}, steps=4), tmp_path / "two")
    assert (two.outcomes[0]["class"], two.outcomes[0]["step"]) == ("numerics", 1)
    assert "the loss is not finite at step 2" in two.outcomes[0]["reason"]
    assert "bf16" in two.outcomes[0]["reason"]
    calls.clear()
    infinite_calls = {2}
    three = train(spec({"loss_scale": {"initial": 1.0}}, steps=4), tmp_path / "three")
    assert three.outcomes[0]["class"] == "numerics", "the smallest scale is 1"


def test_scaler():
    scaler = LossScaler(LossScale(initial=8, growth_interval=2, growth=4, backoff=0.25))
    assert [scaler.updated(), scaler.updated()][1].new == 32
    assert scaler.updated() is None
    assert scaler.overflowed().new == 8
    assert scaler.updated() is None, "an overflow starts a new interval"
    restored = LossScaler(scaler.spec, scaler.state)
    assert restored.updated().new == 32
    assert [restored.overflowed().new for _ in range(3)] == [8, 2, 1]
    assert restored.exhausted


def test_fp16_products_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(64, 512, generator=generator).half().requires_grad_() for _ in range(2)
    )
    with Fp16MatmulMode():
        actual = torch.nn.functional.linear(left, right)
        actual.square().sum().backward()
    with torch.no_grad():
        expected = (left.float() @ right.float().T).half()
        slope = (expected * 2).half()
        assert torch.equal(actual, expected)
        assert torch.equal(left.grad, (slope.float() @ right.float()).half())
        assert torch.equal(right.grad, (slope.float().T @ left.float()).half())


def test_fp16_attention_follows_fp32():
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, 4, 33, 16, generator=generator).half().requires_grad_() for _ in range(3)
    ]
    fp32_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    with Fp16MatmulMode():
        actual = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        actual.float().square().sum().backward()
    expected = torch.nn.functional.scaled_dot_product_attention(*fp32_inputs, is_causal=True)
    expected.square().sum().backward()
    assert actual.dtype is torch.float16
    torch.testing.assert_close(actual.float(), expected, rtol=2e-3, atol=1e-3)
    for half, single in zip(inputs, fp32_inputs, strict=True):
        torch.testing.assert_close(half.grad.float(), single.grad, rtol=1e-2, atol=5e-3)
