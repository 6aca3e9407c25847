"""Serving and scaling pages, the new-run form's check, predictions on run pages, and charts."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from orchestrator.planner.models import Calibration
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.webui.test_planner import sentence, text_of
from webui.planner.charts.axes import Axis, axis, ticks
from webui.planner.charts.memory import squarify, summary, treemap
from webui.planner.charts.pipeline import pipeline
from webui.planner.charts.scatter import scatter
from webui.planner.charts.time import waterfall
from webui.planner.gallery_sample import plan_answer, search_answer
from workers.contracts.wire.points import PointBatch


@pytest.mark.django_db
def test_serving_page(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    page = client.get(
        "/planner/serving/", {"model": "llama3-8b", "device": "h100-80g"}
    ).content.decode()
    assert re.search(
        r"llama3-8b on 1 h100-80g serves batches of \d+: first token after", sentence(page)
    )
    # 2 · 32 layers · 8 heads · 128 · 2 bytes
    assert "kv_bytes_per_token" in page and "128 KiB" in text_of(page)
    none = client.get(
        "/planner/serving/", {"model": "llama3-70b", "device": "h100-80g"}
    ).content.decode()
    assert "does not fit" in sentence(none) and "quantize" in text_of(none)
    for wrong in (
        {"tp": "7"},
        {"prompt_len": "0"},
        {"model": "nothing"},
        {"acceptance": "2"},
        {"tp": "x"},
    ):
        answer = client.get(
            "/planner/serving/", {"model": "llama3-8b", "device": "h100-80g", **wrong}
        )
        assert answer.status_code == 200 and "Fix these inputs" in answer.content.decode(), wrong


@pytest.mark.django_db
def test_scaling_page_forward_and_from_a_budget(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    requested = {
        "parameters": "82G",
        "tokens": "150G",
        "device": "a100-80g",
        "devices": "1024",
        "mfu": "0.5",
        "recompute": "1",
        "tokens_per_parameter": "20",
        "budget_days": "",
    }
    page = client.get("/planner/scaling/", requested).content.decode()
    assert "82G parameters on 150G tokens train in 7.1 days on 1,024 a100-80g" in sentence(page)
    assert "k · N · D" in page
    back = client.get(
        "/planner/scaling/", {**requested, "parameters": "", "tokens": "", "budget_days": "30"}
    )
    assert "30 days of 1,024 a100-80g train" in sentence(back.content.decode())
    empty = client.get(
        "/planner/scaling/", {**requested, "parameters": "", "tokens": ""}
    ).content.decode()
    assert "Fix these inputs" in empty
    assert client.get("/planner/scaling/").status_code == 200


def check(client: Client, **changes: Any) -> str:
    spec = {
        "kind": "train",
        "model": "llama3-8b",
        "plan": {"dp": 4, "micro_batch_size": 1, "precision": "bf16"},
        "train": {"steps": 100, "seq_len": 2048},
        **changes,
    }
    answer = client.post("/runs/check/", {"spec": json.dumps(spec), "from": "json"})
    assert answer.status_code == 200
    return text_of(answer.content.decode())


@pytest.mark.django_db
def test_new_run_form_checks_whether_it_fits(people: factories.People) -> None:
    factories.node("n1", kind="gpu", catalogue="h100-80g", memory_bytes=80 * 2**30)
    client = factories.client_for(people.owner)
    fits = check(client, plan={"dp": 4, "zero": 3, "precision": "bf16"})
    assert "Ready to submit" in fits and re.search(r"Fits [\d.]+ of 80 GiB on h100-80g", fits)
    assert "per step" in fits and "tokens/s, MFU" in fits and "Open in the planner" in fits
    large = check(client)
    assert "Predicted not to fit" in large and "Does not fit" in large and "Submit anyway" in large
    assert re.search("Changes that would make it fit: .*ZeRO [123] instead of 0", large)
    assert "use a smaller model or larger devices" in check(client, model="llama3-70b")
    assert "Fits" not in check(client, kind="script", script={"command": ["a.py"]})


@pytest.mark.django_db
def test_run_that_does_not_fit_requires_force(people: factories.People) -> None:
    factories.node("n1", kind="gpu", catalogue="h100-80g", memory_bytes=80 * 2**30)
    client = factories.client_for(people.owner)
    spec = {
        "kind": "train",
        "model": "llama3-70b",
        "plan": {"dp": 4, "precision": "bf16"},
        "train": {"steps": 10, "seq_len": 512},
    }
    sent = {"name": "large", "spec": json.dumps(spec), "from": "json"}
    refused = client.post("/runs/new/", sent)
    assert refused.status_code == 422 and "Submit anyway" in refused.content.decode()
    assert not Run.objects.exists()
    assert client.post("/runs/new/", {**sent, "force": "1"}).status_code == 302
    assert Run.objects.get().prediction["fits"] is False


def measured(run: Run, **factors: float) -> None:
    """Logs forty steps that are the prediction times a factor."""
    output, steps = run.prediction, list(range(1, 41))
    largest = output["largest_bytes"]
    values = {
        "step_time_s": output["step_time_s"],
        "tokens_per_s": output["tokens_per_s"],
        "mfu": output["mfu"],
        **{
            f"memory/{part}_bytes": largest[part] for part in ("params", "optimizer", "activations")
        },
    }
    batch = PointBatch(
        run=str(run.pk),
        attempt=1,
        rank=0,
        seq=steps,
        step=steps,
        tokens=steps,
        time=[1.79e9 + each for each in steps],
        values={
            name: [value * factors.get(name, 1.0)] * len(steps) for name, value in values.items()
        },
    )
    telemetry.points_store(run=run, attempt=1, batches=[batch])


@pytest.mark.django_db
def test_run_page_shows_predicted_vs_measured(people: factories.People) -> None:
    node = factories.node("n1")
    run = factories.run(
        people.owner,
        plan={"dp": 1, "pp": 2, "micro_batch_size": 1, "global_batch_size": 8},
        resources={"devices": 2},
    )
    factories.running(run, node)
    client = factories.client_for(people.owner)
    before = client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    assert (
        "Predicted pipeline" in before
        and f'hx-get="/runs/{run.pk}/comparison/?part=performance"' in before
    )
    panels = json.loads(html.unescape(re.search(r'id="run-panels"[^>]*>(.*?)</script>', before)[1]))  # type: ignore[index]
    levels = {level["label"]: level["value"] for panel in panels for level in panel["levels"]}
    assert levels["full step predicted"] == pytest.approx(run.prediction["step_time_s"])
    measured(run, step_time_s=1.04, **{"memory/activations_bytes": 1.5})
    speed = text_of(client.get(f"/runs/{run.pk}/comparison/?part=performance").content.decode())
    assert "within 10%" in speed and "+4.0%" in speed
    held = text_of(client.get(f"/runs/{run.pk}/comparison/?part=memory").content.decode())
    assert "Outside: activations +50.0%" in held
    assert client.get(f"/runs/{run.pk}/?tab=memory").status_code == 200
    outside = factories.client_for(factories.user("outside"))
    assert outside.get(f"/runs/{run.pk}/comparison/").status_code == 404


@pytest.mark.django_db
def test_finished_run_calibrates(people: factories.People) -> None:
    run = factories.run(people.owner)
    factories.running(run, factories.node("n1"))
    measured(run, step_time_s=1.3)
    client = factories.client_for(people.owner)
    early = client.post(f"/runs/{run.pk}/act/", {"action": "calibrate"})
    assert early.status_code in (302, 422) and not Calibration.objects.exists()
    Run.objects.filter(pk=run.pk).update(state="finished", ended=timezone.now())
    assert (
        "Add to calibration"
        in client.get(f"/runs/{run.pk}/comparison/?part=performance").content.decode()
    )
    done = client.post(
        f"/runs/{run.pk}/act/", {"action": "calibrate"}, follow=True
    ).content.decode()
    made = Calibration.objects.get()
    assert made.default and made.rows == 1 and "Predictions for cpu now use" in text_of(done)
    client.post(f"/runs/{run.pk}/act/", {"action": "calibrate"})
    assert Calibration.objects.get().rows == 1  # the same run replaces itself
    later = client.get(
        "/planner/?device=cpu&model=llama-tiny&seq_len=64&global_batch_size=8&precision=fp32"
    )
    assert f"calibrated by {made.name}" in text_of(later.content.decode())


def test_treemap_areas_are_proportional_to_bytes() -> None:
    boxes = squarify([6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], 6.0, 4.0)
    assert [round(width * height, 6) for _, _, width, height in boxes] == [
        6.0,
        6.0,
        4.0,
        3.0,
        2.0,
        2.0,
        1.0,
    ]
    assert all(0 <= left <= 6 and 0 <= top <= 4 for left, top, _, _ in boxes)
    memory = plan_answer(0)["memory"]
    segments = treemap(memory)
    assert sum(segment.width * segment.height for segment in segments) == pytest.approx(
        10_000, rel=1e-3
    )
    assert [segment.name for segment in segments][:2] == [
        "params_bytes",
        "grads_bytes",
    ] and segments[-1].name == "free"
    assert "of 80 GiB" in summary(memory)
    assert treemap({"capacity_bytes": 0}) == []


def test_waterfall_ends_at_the_step_time() -> None:
    answer = plan_answer(2)
    drawn = waterfall(answer)
    assert drawn is not None
    last = drawn.bars[-1]
    assert last.left + last.width == pytest.approx(drawn.total.width, abs=0.3)
    assert drawn.low < drawn.total.width < drawn.high
    assert "80% interval" in drawn.summary and waterfall({"step_time_s": None}) is None


def test_scatter_with_front_and_with_one_plan() -> None:
    plans = [
        {
            "key": str(index),
            "glyph": "dp8",
            "step_time_s": each["step_time_s"],
            "fits": True,
            "total_bytes": each["memory"]["total_bytes"],
            "capacity_bytes": each["memory"]["capacity_bytes"],
        }
        for index, each in enumerate(search_answer()["plans"])
    ]
    drawn = scatter(plans, pareto=[0, 3], chosen="3")
    assert drawn is not None and "2 Pareto-optimal" in drawn.summary and drawn.points[3].chosen
    assert all(0 <= point.x <= 100 and 0 <= point.y <= 100 for point in drawn.points)
    one = scatter(plans[:1], pareto=[0], chosen="")
    assert one is not None and one.x_ticks and scatter([], pareto=[], chosen="") is None


def test_pipeline_draws_every_block() -> None:
    from orchestrator.planner.schedules.simulate import simulate
    from orchestrator.planner.schedules.timeline import timeline

    ran = simulate("zb1p", 4, 8, forward_s=1.0, backward_s=1.0, weight_s=1.0, virtual_stages=2)
    drawn = pipeline(timeline(ran, 8))
    assert len(drawn.rows) == 4 and [word for word, _ in drawn.legend] == [
        "forward",
        "backward",
        "weight gradient",
    ]
    assert sum(path.count("M") for row in drawn.rows for _, path in row.paths) == 4 * 2 * 8 * 3
    assert "8 micro-batches" in drawn.summary and not drawn.note


@pytest.mark.parametrize(
    ("over", "unit"),
    [
        (axis([1.0, 80e9], zero=True), "bytes"),
        (axis([2.3, 4.4]), "s"),
        (axis([300.0, 700.0]), "s"),
        (axis([0.01, 90.0], log=True), "s"),
        (Axis(0.0, 1.0), ""),
        (axis([5.0, 5.0]), "s"),
    ],
)
def test_ticks_are_few_and_on_the_axis(over: Axis, unit: str) -> None:
    result = ticks(over, unit)
    assert 1 <= len(result) <= 7 and all(0 <= tick.at <= 100 and tick.label for tick in result)
    assert len({tick.label for tick in result}) == len(result)


@pytest.mark.django_db
def test_serving_load_page(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    requested = {"model": "llama3-8b", "device": "h100-80g", "rate": "6", "ttft_limit": "0.5"}
    page = client.get("/planner/serving-load/", requested).content.decode()
    assert re.search(r"99% of requests get their first token within [\d.]+ ms", sentence(page))
    text = text_of(page)
    assert "serves up to" in text and "1 replica is enough for 6" in text
    full = client.get("/planner/serving-load/", {**requested, "rate": "900"}).content.decode()
    assert "the queue keeps growing" in sentence(full)
    for wrong in (
        {"rate": "0"},
        {"tp": "7"},
        {"prompt_len": "9000"},
        {"run": "999999"},
        {"shared_prefix": "5000"},
    ):
        answer = client.get("/planner/serving-load/", {**requested, **wrong}).content.decode()
        assert "Fix these inputs" in answer, wrong
