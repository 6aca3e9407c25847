"""The prediction of preference optimization counts the frozen reference."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runs.submission.prediction.training import predict_training
from orchestrator.runs.submission.target_hardware import TargetHardware
from workers.contracts import ParallelPlan, RunSpec
from workers.contracts.catalog.devices import DEVICES


def predicted(
    plan: dict[str, Any], *, data: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    body = {"steps": 1, "seq_len": 64, "objective": "dpo", **train}
    data = data or {"path": "pairs.jsonl", "format": "preference"}
    spec = RunSpec.from_dict(
        {"kind": "train", "model": "llama-15m", "data": data, "plan": plan, "train": body}
    )
    assert isinstance(spec.plan, ParallelPlan)
    hardware = TargetHardware(entry=DEVICES["cpu"], per_node=2, known=True)
    prediction = predict_training(spec, spec.plan, hardware)
    assert prediction is not None
    return prediction.document


@pytest.mark.parametrize("zero", [0, 3])
def test_a_reference_has_the_bytes_of_the_weights(zero: int) -> None:
    document = predicted({"dp": 2, "zero": zero, "global_batch_size": 2})
    largest = document["largest_bytes"]
    assert largest["reference"] == largest["params"] > 0
    assert document["memory"]["reference_bytes"] == document["memory"]["params_bytes"]


def test_a_loss_without_reference_has_none() -> None:
    document = predicted({}, dpo={"loss": "simpo"})
    assert "reference" not in document["largest_bytes"]
    assert document["memory"]["reference_bytes"] == 0


def test_a_policy_run_has_a_prediction_with_its_rollouts() -> None:
    grpo = {
        "rewards": [{"kind": "exact"}],
        "rollout": {"max_new_tokens": 16},
        "prompts_per_step": 2,
        "kl": {"coef": 0.1},
    }
    data = {"path": "prompts.jsonl", "format": "prompt_completion"}
    document = predicted({"global_batch_size": 16}, objective="grpo", grpo=grpo, data=data)
    assert document["largest_bytes"]["reference"] > 0
    assert document["memory"]["rollout_bytes"] > 0 and document["time"]["rollout_s"] > 0
    assert 0 < document["generation_share"] < 1
    assert set(document["rollouts"]) == {"generation_s", "sync_s"}
    assert any("Generation takes" in note for note in document["notes"])
