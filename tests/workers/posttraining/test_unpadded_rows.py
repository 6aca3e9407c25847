"""Rows of rollouts are computed and counted without their padding, with equal results."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.test_policy_runs import FULL, STEPS, TINY, prompts, spec
from tests.workers.training.conftest import final_weights, relative
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.training.parallel import unpadded
from workers.training.parallel.batch_sharding import IGNORED, Batch, Microbatch
from workers.training.parallel.unpadded import Unpadding

__all__ = ["prompts"]
pytestmark = pytest.mark.ranks
EXPERTS = {**TINY, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("model", [TINY, EXPERTS], ids=["joined", "cut"])
def test_padding_changes_no_result(pools, prompts, tmp_path, monkeypatch, model, temperature):
    """From the same rollouts, padded to the sequence length and not."""
    options = {**FULL, "rollout": {"max_new_tokens": 6, "temperature": temperature}}
    made = {**spec(prompts, {"micro_batch_size": 4}, grpo=options), "model": model}
    without = run_policy(pools, made, tmp_path / "unpadded")
    monkeypatch.setattr(Unpadding, "apply", lambda self, batch, lengths: batch)
    stored = "checkpoints/rollouts"
    shutil.copytree(tmp_path / "unpadded" / stored, tmp_path / "padded" / stored)
    padded = run_policy(pools, made, tmp_path / "padded")
    for name in ("loss", "kl", "entropy", "grad_norm"):
        expected = padded.values(name)
        assert without.values(name) == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    expected = final_weights(padded, STEPS)
    for name, weight in final_weights(without, STEPS).items():
        assert relative(weight, expected[name]) <= 1e-5, name


def test_only_tokens_are_counted_and_computed(pools, prompts, tmp_path, monkeypatch):
    computed = []
    apply = Unpadding.apply

    def counting(self, batch, lengths):
        out = apply(self, batch, lengths)
        computed.append((out.inputs.numel(), sum(lengths)))
        return out

    monkeypatch.setattr(unpadded.Unpadding, "apply", counting)
    made = spec(prompts, {"micro_batch_size": 8}, steps=2)
    result = run_policy(pools, made, tmp_path)
    lines = (tmp_path / "rank-0" / "rollouts.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    positions = [
        sum(len(each["prompt_ids"]) + len(each["token_ids"]) - 1 for each in part)
        for part in (rollouts[:8], rollouts[8:])
    ]
    text = (tmp_path / "rank-0" / "points.jsonl").read_text()
    points = [json.loads(line) for line in text.splitlines()]
    counted = [each["tokens"] for each in points if "loss" in each.get("values", {})]
    assert counted == [positions[0], sum(positions)]
    assert [total for _, total in computed] == positions
    assert all(size - total < 8 for size, total in computed)
    assert result.outcomes[0]["class"] == "ok"


@pytest.mark.parametrize("lengths", [[3, 5], [8, 8], [1], []])
def test_a_joined_batch_keeps_every_number(lengths):
    plan, model = ParallelPlan(micro_batch_size=3), ModelSpec(**TINY)
    numbers = torch.arange(24).view(3, 8)
    targets = numbers.masked_fill(numbers % 2 == 0, IGNORED)
    values = {"advantage": numbers.float()}
    microbatch = Microbatch(0, len(lengths), 3 - len(lengths))
    batch = Batch(microbatch, numbers, targets, None, None, (), 8, None, values)
    joined = Unpadding(plan, model, compiled=False).apply(batch, lengths)
    stored = [
        number for row, length in enumerate(lengths) for number in range(row * 8, row * 8 + length)
    ]
    total = len(stored)
    assert joined.length % 8 == 0 and joined.inputs.shape == (1, joined.length)
    assert joined.inputs[0, :total].tolist() == stored
    assert joined.targets[0, :total].tolist() == targets.flatten()[stored].tolist()
    assert joined.values["advantage"][0, :total].tolist() == stored
    assert (joined.targets[0, total:] == IGNORED).all()
    begins = [sum(lengths[:row]) for row in range(len(lengths))] or [0]
    assert list(joined.documents.starts[0])[: len(begins)] == begins


@pytest.mark.parametrize("reason", [{"compiled": True}, {"pp": 2}])
def test_shapes_stay_where_they_must(reason):
    plan = ParallelPlan(pp=reason.get("pp", 1), micro_batch_size=2, global_batch_size=4)
    numbers = torch.zeros(2, 8, dtype=torch.int64)
    batch = Batch(Microbatch(0, 2), numbers, numbers, None, None, (), 8)
    unpadding = Unpadding(plan, ModelSpec(**TINY), compiled=reason.get("compiled", False))
    assert unpadding.apply(batch, [2, 3]) is batch
