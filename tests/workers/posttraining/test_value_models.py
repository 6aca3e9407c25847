"""A value model under fp16, with experts, and with paged states: as one process, and resumed."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.test_policy_runs import TINY, prompts
from tests.workers.posttraining.test_ppo_runs import COMPARED, STEPS, spec
from tests.workers.training.conftest import final_weights, relative
from tests.workers.training.test_paged import HostPages
from workers.models.weights.manifest import read_manifest
from workers.posttraining.reinforcement.value.model import ValueModel
from workers.training.loop.step_report import StepReport
from workers.training.setup import trained_module

__all__ = ["prompts"]
pytestmark = pytest.mark.ranks
# expert weights of every layer; the balance loss has a gradient of its own
EXPERTS = {
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 16, "aux_loss": 0.1, "bias_update": 0.01}
}
HIGH = {"precision": "fp16", "loss_scale": {"initial": 2.0**28, "growth_interval": 2}}
LOW = {"precision": "fp16", "loss_scale": {"initial": 1024.0, "growth_interval": 3}}


def events(result, kind):
    lines = (result.directory / "rank-0" / "events.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    return [each["data"] for each in every if each["type"] == kind]


def with_rollouts_of(other, folder):
    """A run's folder that continues with the rollouts of another one."""
    shutil.copytree(other.directory / "checkpoints/rollouts", folder / "checkpoints/rollouts")
    return folder


def agree(other, alone, *, within):
    assert {each["class"] for each in other.outcomes} == {"ok"}, other.outcomes
    for name in COMPARED:
        expected = alone.values(name)
        assert other.values(name) == pytest.approx(expected, rel=within, abs=within / 10), name
    expected = final_weights(alone, STEPS)
    for name, weight in final_weights(other, STEPS).items():
        assert relative(weight, expected[name]) <= within, name


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 2}, {"dp": 2, "ep": 2}])
def test_experts_of_a_value_model_are_balanced_as_in_one_process(pools, prompts, tmp_path, plan):
    def made(plan=None):
        return {**spec(prompts, plan), "model": {**TINY, **EXPERTS}}

    alone = run_policy(pools, made(), tmp_path / "alone")
    other = run_policy(pools, made(plan), with_rollouts_of(alone, tmp_path / "other"))
    agree(other, alone, within=1e-5)
    still = {**EXPERTS["moe"], "aux_loss": 0.0}
    without = {**made(), "model": {**TINY, "moe": still}}
    plain = run_policy(pools, without, with_rollouts_of(alone, tmp_path / "plain"))
    assert plain.values("value/grad_norm") != alone.values("value/grad_norm")


def test_fp16_has_a_loss_scale_for_each_of_both_models(pools, prompts, tmp_path):
    alone = run_policy(pools, spec(prompts, LOW), tmp_path / "alone")
    other = run_policy(
        pools, spec(prompts, {**LOW, "dp": 2, "zero": 2}), with_rollouts_of(alone, tmp_path / "two")
    )
    agree(other, alone, within=2e-3)
    assert alone.values("value/loss_scale") == [1024.0, 1024.0, 1024.0, 2048.0]
    changed = events(alone, "loss_scale_changed")
    assert [each.get("model") for each in changed] == [None, "value"]
    wide = run_policy(pools, spec(prompts), with_rollouts_of(alone, tmp_path / "fp32"))
    assert alone.values("value_loss") == pytest.approx(wide.values("value_loss"), rel=2e-2)


def test_an_overflow_skips_the_value_models_update_and_its_scale_is_restored(
    pools, prompts, tmp_path
):
    checkpoint = {"every_steps": 1, "async": False, "keep": 24}
    whole = run_policy(
        pools, spec(prompts, HIGH, steps=24, checkpoint=checkpoint), tmp_path / "whole"
    )
    assert whole.outcomes[0]["class"] == "ok", whole.outcomes
    scales, skipped = whole.values("value/loss_scale"), whole.values("value/skipped_updates")
    assert scales[0] == 2.0**28 and scales[1] == 2.0**27 and skipped[0] == 1
    assert 2 < skipped[-1] < 20
    saved = read_manifest(tmp_path / "whole/checkpoints/step-00000012")["value_loss_scale"]
    assert saved["scale"] == scales[12] and saved["skipped"] == skipped[11]
    half = tmp_path / "half"
    run_policy(pools, spec(prompts, HIGH, steps=20, checkpoint=checkpoint), half)
    again = run_policy(pools, spec(prompts, HIGH, steps=24, checkpoint=checkpoint), half)
    assert again.outcomes[0]["class"] == "ok", again.outcomes
    points = {each["step"]: each["values"] for each in again.points()}
    for name in ("value/loss_scale", "value/skipped_updates", "value_loss"):
        assert [points[step][name] for step in (21, 22, 23, 24)] == whole.values(name)[20:], name


def test_a_value_model_without_an_update_ends_as_numerics_after_saving(
    pools, prompts, tmp_path, monkeypatch
):
    """The last step has its checkpoint and its point, as if the policy had no update."""
    read = ValueModel._read

    def overflow(self, *given):
        values, balance = read(self, *given)
        return values | {"value/grad_norm": math.inf}, balance

    monkeypatch.setattr(ValueModel, "_read", overflow)
    for saves_async in (False, True):
        folder = tmp_path / str(saves_async)
        checkpoint = {"every_steps": 3, "async": saves_async}
        result = run_policy(pools, spec(prompts, LOW, steps=3, checkpoint=checkpoint), folder)
        [outcome] = result.outcomes
        assert (outcome["class"], outcome["step"]) == ("numerics", 3), outcome
        assert "no update of the value model was made in 3 steps" in outcome["reason"]
        assert result.values("value/skipped_updates") == [1.0, 2.0, 3.0]
        saved = read_manifest(folder / "checkpoints/step-00000003")
        assert saved["value_loss_scale"]["updates"] == 0 and saved["loss_scale"]["updates"] == 3


def test_memory_counts_both_models_if_the_policys_first_update_is_skipped(
    pools, prompts, tmp_path, monkeypatch
):
    """The value model's state exists before the policy's then."""
    adamw = {"name": "adamw", "lr": 0.01}
    names = [f"memory/{each}_bytes" for each in ("params", "grads", "optimizer")]
    read, skips = StepReport.read, []

    def overflow_at_first(self, pending):
        values, sums = read(self, pending)
        if skips and skips.pop():
            values |= {"grad_norm": math.inf}
        return values, sums

    monkeypatch.setattr(StepReport, "read", overflow_at_first)
    sizes = []
    for skipped in (0, 1):
        skips.append(skipped)
        folder = tmp_path / str(skipped)
        result = run_policy(pools, spec(prompts, LOW, steps=3, optimizer=adamw), folder)
        assert result.outcomes[0]["class"] == "ok", result.outcomes
        assert result.values("skipped_updates")[-1] == skipped
        assert result.values("value/skipped_updates")[-1] == 0
        sizes.append([result.values(name)[-1] for name in names])
    assert sizes[0] == sizes[1] and all(sizes[0])


def test_states_of_both_models_are_paged(pools, prompts, tmp_path, monkeypatch):
    pages = HostPages()
    monkeypatch.setattr(trained_module, "UnifiedMemory", lambda device: pages)
    monkeypatch.setattr("workers.training.offload.paged.SMALLEST", 1)
    adamw = {"name": "adamw", "lr": 0.01}
    plain = run_policy(pools, spec(prompts, optimizer=adamw), tmp_path / "plain")
    assert not pages.taken
    paged = run_policy(pools, spec(prompts, optimizer={**adamw, "paged": True}), tmp_path / "paged")
    assert paged.outcomes[0]["class"] == "ok", paged.outcomes
    names = sum(name.endswith("weight") for name in final_weights(plain, STEPS))
    assert len(pages.taken) >= 4 * names  # two moments of each of both models
    for name in ("loss", "value_loss"):
        assert paged.values(name) == plain.values(name), name
