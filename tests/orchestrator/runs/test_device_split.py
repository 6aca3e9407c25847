"""The split of devices between training and separate rollouts, chosen at submission."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Run
from tests import factories
from workers.contracts import RunSpec

pytestmark = pytest.mark.django_db


def spec(
    devices: Any = "auto",
    *,
    total: int | None = 8,
    new: int = 512,
    seq_len: int = 1024,
    **more: Any,
) -> Any:
    rollout = {"max_new_tokens": new, "sync": "separate", "devices": devices}
    grpo = {
        "rewards": [{"kind": "regex", "pattern": "a"}],
        "group_size": 8,
        "prompts_per_step": 105,
        "rollout": rollout,
        "staleness": {"max": 2, "correction": "decoupled"},
    }
    train = {"objective": "grpo", "steps": 10, "seq_len": seq_len, "grpo": grpo}
    return {
        "kind": "train",
        "model": "qwen3-8b",
        "data": {"preset": "shakespeare"},
        "plan": "auto",
        "train": train,
        "resources": {} if total is None else {"devices": total},
        **more,
    }


@pytest.fixture
def data(settings: Any, tmp_path: Any) -> dict[str, Any]:
    settings.DATA_ROOTS = [tmp_path]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    return {"data": {"path": str(path), "format": "prompt_completion"}}


def submit(owner: User, wanted: dict[str, Any]) -> Run:
    return services.run_submit(owner=owner, name="split", spec=wanted)


@pytest.fixture
def gpus() -> None:
    factories.node("n1", devices=8, kind="gpu", catalogue="h100-80g", memory_bytes=80 * 2**30)


def test_the_fastest_split_is_chosen(owner: User, gpus: None, data: dict[str, Any]) -> None:
    run = submit(owner, spec() | data)
    splits = run.prediction["splits"]
    assert [each["rollouts"] for each in splits] == list(range(1, 8))
    assert all(each["training"] + each["rollouts"] == 8 for each in splits)
    assert max(each["plan"]["micro_batch_size"] for each in splits) > 1
    usable = [each for each in splits if each["fits"]]
    best = min(usable, key=lambda each: each["step_time_s"])
    number = run.spec["train"]["grpo"]["rollout"]["devices"]
    assert number == best["rollouts"] and run.plan == best["plan"]
    # the prediction stored with the run is that of the split, and the node gets the number
    assert run.prediction["step_time_s"] == pytest.approx(best["step_time_s"])
    launched = RunSpec.from_dict(selectors.launch_spec(run))
    assert run.devices == launched.devices == 8 and launched.rollout_devices == number
    [resolved] = [each for each in selectors.events_of(run=run) if each.type == "plan_resolved"]
    assert f"{8 - number} train and {number} sample" in resolved.data["why"]
    # a clone keeps the numbers; short answers need fewer devices for sampling
    assert submit(owner, run.spec).spec["train"] == run.spec["train"]
    short = submit(owner, spec(new=8, seq_len=512) | data)
    assert short.spec["train"]["grpo"]["rollout"]["devices"] < number


def test_rollouts_get_what_an_explicit_plan_leaves(
    owner: User, gpus: None, data: dict[str, Any]
) -> None:
    plan = {"dp": 4, "zero": 3, "precision": "bf16", "global_batch_size": 840}
    run = submit(owner, spec(plan=plan) | data)
    assert run.spec["train"]["grpo"]["rollout"]["devices"] == 4 and run.devices == 8
    assert "splits" not in run.prediction


@pytest.mark.parametrize(
    ("total", "plan", "message"),
    [
        (None, "auto", "which is not set"),
        (1, "auto", "1 cannot be split"),
        (4, {"dp": 4, "global_batch_size": 840}, "uses 4 of 4 devices"),
    ],
)
def test_nothing_to_split_is_refused(
    owner: User, gpus: None, data: dict[str, Any], total: int | None, plan: Any, message: str
) -> None:
    with pytest.raises(Refusal) as refused:
        submit(owner, spec(total=total, plan=plan) | data)
    [item] = [
        each for each in refused.value.errors if each["field"] == "train.grpo.rollout.devices"
    ]
    assert message in item["message"] and item["hint"].startswith("Use resources.devices")


def test_other_words_are_refused_by_field(owner: User, data: dict[str, Any]) -> None:
    for wrong in ("many", 0):
        with pytest.raises(Refusal) as refused:
            submit(owner, spec(wrong) | data)
        assert {each["field"] for each in refused.value.errors} == {"train.grpo.rollout.devices"}


def test_pages_show_the_splits(owner: User, gpus: None, data: dict[str, Any]) -> None:
    client = factories.client_for(owner)
    run = submit(owner, spec() | data)
    page = client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    assert "Devices for training and for sampling" in page
    assert page.count('<span class="badge good">used</span>') == 1
