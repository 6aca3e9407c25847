"""The planner at submission: plan, prediction, and refusal of plans that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.planner.store import services as planner
from orchestrator.runs import selectors, services
from orchestrator.runs.outputs.training_data import trained_share
from tests import factories
from workers.contracts import ParallelPlan, RunSpec
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.training_support import engine_problems

pytestmark = pytest.mark.django_db
TRAIN = {"steps": 20, "seq_len": 2048}
LARGE: dict[str, Any] = {
    "kind": "train",
    "model": "llama3-8b",
    "train": TRAIN,
    "plan": {"dp": 8, "zero": 1, "precision": "bf16", "global_batch_size": 8},
}


def submit(owner: User, spec: dict[str, Any], **more: Any) -> Any:
    return services.run_submit(owner=owner, name="x", spec=spec, **more)


def test_every_training_run_carries_its_prediction(owner: User) -> None:
    factories.node("n1", devices=8, kind="gpu", catalogue="h100-80g", memory_bytes=79 * 2**30)
    run = submit(owner, {**LARGE, "plan": {**LARGE["plan"], "zero": 3, "recompute": "full"}})
    result = selectors.serialize_run(run)["prediction"]
    assert (
        result["device"] == "h100-80g"
        and result["fits"]
        and not result["assumed"]
        and result["calibration"] is None
    )
    # what the node says it has counts, not what the catalogue says
    assert result["memory"]["capacity_bytes"] == 79 * 2**30
    assert result["step_time_low_s"] < result["step_time_s"] < result["step_time_high_s"]
    assert result["tokens_per_s"] == pytest.approx(8 * 2048 / result["step_time_s"])
    assert 0 < result["mfu"] < 1 and result["memory"]["params_bytes"] > 0
    for kind in ({"kind": "external"}, {"kind": "script", "script": {"command": ["x.py"]}}):
        assert submit(owner, kind).prediction is None


def test_a_plan_that_does_not_fit_is_refused_with_changes(owner: User) -> None:
    factories.node("n1", devices=8, kind="gpu", catalogue="h100-80g", memory_bytes=80 * 2**30)
    with pytest.raises(Refusal) as caught:
        submit(owner, LARGE)
    refusal = caught.value
    assert (refusal.type, refusal.status) == ("plan-does-not-fit", 422) and "GiB" in refusal.detail
    assert refusal.errors and all(
        error["field"].startswith(("plan", "train")) for error in refusal.errors
    )
    assert any("ZeRO" in error["hint"] for error in refusal.errors)
    forecast = services.spec_preview(LARGE)
    assert (
        forecast["problems"] == []
        and forecast["fits"] is False
        and len(forecast["misfits"]) == len(refusal.errors)
    )

    run = submit(owner, LARGE, force=True)
    [resolved] = [event for event in selectors.events_of(run=run) if event.type == "plan_resolved"]
    assert resolved.data["forced"] and resolved.data["misfits"] and run.prediction["fits"] is False
    assert services.run_clone(run=run, by=owner).prediction["fits"] is False
    attempt = factories.running(run, factories.node("n2", devices=8))
    services.attempt_exited(
        attempt=attempt, exit_class="out_of_memory", exit={"reason": "rank 3 ran out of memory"}
    )
    run.refresh_from_db()
    assert run.exit["reason"].startswith(
        "rank 3 ran out of memory. It was submitted against the planner's advice: plan."
    )
    assert "GiB per device" in run.exit["reason"] and ". Use " in run.exit["reason"]


def test_nothing_is_refused_if_the_devices_are_unknown(owner: User) -> None:
    run = submit(owner, LARGE)
    assert run.prediction["assumed"] and run.prediction["device"] == "cpu"
    named = submit(owner, {**LARGE, "resources": {"device": "a100-80g"}})
    assert named.prediction["device"] == "a100-80g"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("plan", [{"plan": "auto"}, {}], ids=["auto", "none"])
def test_an_open_plan_is_the_planners_within_what_the_engine_runs(
    owner: User, plan: dict[str, Any], compiled: bool
) -> None:
    factories.node("n1", devices=8, kind="gpu", catalogue="h100-80g", memory_bytes=80 * 2**30)
    train = {**TRAIN, "compile": compiled}
    spec = {
        "kind": "train",
        "model": "llama3-8b",
        "train": train,
        "resources": {"devices": 8},
        **plan,
    }
    run = submit(owner, spec)
    chosen = ParallelPlan.from_dict(run.plan)
    assert (chosen.dp, chosen.precision, chosen.global_batch_size) == (
        8,
        "bf16",
        8,
    ) and chosen.zero >= 2
    assert (
        not engine_problems(RunSpec.from_dict(selectors.launch_spec(run)))
        and run.prediction["fits"]
    )
    [resolved] = [event for event in selectors.events_of(run=run) if event.type == "plan_resolved"]
    assert resolved.data["automatic"] and "fastest" in resolved.data["why"]


def test_an_open_plan_takes_the_half_precision_that_its_devices_have(owner: User) -> None:
    for name, kind, precision in (
        ("v100-32g", "gpu", "fp16"),
        ("a100-40g", "gpu", "bf16"),
        ("cpu", "cpu", "fp32"),
    ):
        factories.node(name, devices=2, kind=kind, catalogue=name, pool=name)
        spec = {
            "kind": "train",
            "train": {"steps": 1, "seq_len": 64},
            "resources": {"devices": 2, "pool": name},
        }
        assert submit(owner, spec).plan["precision"] == precision


def test_measured_peaks_and_calibrations_come_along(owner: User) -> None:
    factories.node("n1", devices=4)
    first = submit(owner, factories.spec())
    for tflops in (0.6, 1e9):  # the second is not valid
        data = {"tflops": tflops, "precision": "fp32"}
        services.event_record(run=first, type="peak_measured", data=data, attempt=1)
    second = submit(owner, factories.spec())
    peaks = second.prediction["cluster"]["device"]["peak_tflops"]
    assert peaks["fp32"] == peaks["fp16"] == 0.6 > peaks["bf16"]
    assert second.prediction["step_time_s"] < first.prediction["step_time_s"]
    assert second.prediction["peak_tflops"] == 0.6
    assert second.prediction["mfu"] == pytest.approx(second.prediction["tflops_per_device"] / 0.6)
    line = {
        "id": 1,
        "model": "llama-tiny",
        "plan": second.plan,
        "cluster": second.prediction["cluster"],
        "workload": {"seq_len": 64},
        "framework": "orrery",
        "measured": {"step_time_s": 3 * second.prediction["step_time_s"]},
    }
    planner.calibration_add(by=owner, name="home", measurements=[line], default=True)
    third = submit(owner, factories.spec())
    assert third.prediction["calibration"] == "home"
    assert third.prediction["step_time_s"] > 1.2 * second.prediction["step_time_s"]


def distilled(owner: User, teacher: dict[str, Any]) -> dict[str, Any]:
    train = {"steps": 1, "seq_len": 64, "objective": "distill", "distill": {"teacher": teacher}}
    data = {"path": "chats.jsonl", "format": "messages"}
    spec = {"kind": "train", "model": "llama-15m", "data": data, "train": train}
    preview = services.spec_preview({**spec, "plan": {}}, by=owner)
    assert preview["problems"] == []
    return dict(preview["prediction"])


def test_a_teacher_at_a_path_counts(owner: User, data_root: Path) -> None:
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (data_root / "chats.jsonl").write_text(line + "\n")
    train = {"steps": 1, "seq_len": 64}
    run = submit(owner, {"kind": "train", "model": "llama-15m", "train": train, "plan": {}})
    teacher = f"{settings.ENV.media_runs}/{run.pk}/checkpoints/step-00000001"
    folder = Path(teacher)
    folder.mkdir(parents=True, exist_ok=True)
    predicted = distilled(owner, {"path": teacher})
    assert predicted["memory"]["reference_bytes"] == 4 * parameter_count(preset("llama-15m")).total
    assert not any("teacher" in note for note in predicted["notes"])


def test_an_unknown_teacher_is_named(owner: User, data_root: Path) -> None:
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (data_root / "chats.jsonl").write_text(line + "\n")
    (data_root / "teacher").mkdir()
    predicted = distilled(owner, {"path": str(data_root / "teacher")})
    assert any("teacher's memory and time are not counted" in note for note in predicted["notes"])
    (data_root / "teacher" / "teacher.json").write_text("{}")
    predicted = distilled(owner, {"path": str(data_root / "teacher")})
    assert not any("teacher" in note for note in predicted["notes"]), "stored tokens run no model"


def test_memory_on_a_cpu_counts_the_share_of_trained_tokens_that_a_run_reported(
    owner: User,
) -> None:
    node = factories.node("n1")
    data = settings.DATA_ROOTS[0] / "chats.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    spec: dict[str, Any] = {
        "kind": "train",
        "model": "llama-15m",
        "data": {"path": "chats.jsonl", "format": "prompt_completion"},
        "plan": {"micro_batch_size": 4, "global_batch_size": 4},
        "train": {"steps": 2, "seq_len": 256, "objective": "sft"},
    }
    first = submit(owner, spec)

    def logits_bytes(run: Any) -> float:
        return float(run.prediction["memory"]["logits_bytes"])

    attempt = factories.running(first, node)
    sources = {"chats": {"rows": 10, "trained_tokens": 640}}
    services.event_record(
        run=first,
        type="data_statistics",
        data={"seq_len": 256, "sources": sources},
        attempt=attempt.number,
    )
    # a quarter of the 4 x 256 positions, and others of another length
    assert logits_bytes(submit(owner, spec)) < 0.5 * logits_bytes(first)
    longer = {**spec, "train": {**spec["train"], "seq_len": 128}}
    assert trained_share(RunSpec.from_dict(longer)) == 1.0
    assert trained_share(RunSpec.from_dict(first.spec)) == 0.25
    # events are written by programs: a newer one without the numbers is passed over
    services.event_record(
        run=first,
        type="data_statistics",
        data={"sources": {"chats": {"rows": "many"}}},
        attempt=attempt.number,
    )
    assert trained_share(RunSpec.from_dict(first.spec)) == 0.25
