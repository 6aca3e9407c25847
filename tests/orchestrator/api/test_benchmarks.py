"""A benchmark run: submission, events, its table by REST and page, calibration from it."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from orchestrator.accounts.models import User
from orchestrator.planner.models import Calibration
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run, RunEvent
from tests import factories
from tests.orchestrator.api.test_middleware import problem
from tests.orchestrator.api.test_runs import RUNS, post
from workers.contracts import RunSpec
from workers.contracts.specs.benchmarks.variants import expand

pytestmark = pytest.mark.django_db
BODY: dict[str, Any] = {
    "techniques": ["recompute", "zero", "collectives", "products"],
    "steps": 12,
    "warmup_steps": 1,
    "seq_len": 64,
}
SPEC: dict[str, Any] = {
    "kind": "benchmark",
    "plan": {"dp": 2, "micro_batch_size": 2, "global_batch_size": 4},
    "benchmark": BODY,
}


def result(run: Run) -> None:
    """What the ranks of a benchmark report: the last variant is not reached, the one before has
    failed.
    """
    match = expand(RunSpec.from_dict(run.spec))
    names = [
        {"id": each.id, "technique": each.technique, "name": each.name} for each in match.variants
    ]
    began = {
        "variants": names,
        "left_out": [{"technique": "schedule", "name": "all", "reason": "one stage"}],
        "devices": match.devices,
        "turns": 3,
        "turn_steps": 5,
        "warmup_steps": 1,
    }
    sizes = [4096 * 4**power for power in range(8)]
    rows = [
        {
            "kind": kind,
            "bytes": size,
            "seconds": 1e-4 + size / 1e9,
            "bus_bytes_per_s": size / (1e-4 + size / 1e9),
        }
        for kind in ("all_reduce", "send_recv")
        for size in sizes
    ]
    link = {"where": "intra", "bytes_per_s": 1.6e9, "latency_s": 7e-5}
    events = [
        ("benchmark_began", began),
        ("benchmark_collectives", {"ranks": 2, "rows": rows, "link": link}),
        (
            "benchmark_products",
            {"rows": [{"precision": "bf16", "size": 512, "seconds": 0.1, "tflops": 0.3}]},
        ),
    ]
    for place, each in enumerate(match.variants[:-1]):
        head = {
            "id": each.id,
            "technique": each.technique,
            "name": each.name,
            "plan": each.plan.to_dict(),
        }
        seconds = 0.2 * (1 + place / 4)
        numbers = {
            "state": "measured",
            "step_time_s": seconds,
            "low_s": 0.9 * seconds,
            "high_s": 1.1 * seconds,
            "steps": 12,
            "turns_s": [seconds] * 3,
            "samples_per_s": 4 / seconds,
            "tokens_per_s": 256 / seconds,
            "mfu": 0.1,
            "peak_bytes": 4e8 / (1 + place),
            "memory": {"params": 1e8},
            "loss": 5.25,
            "deviation": 0.0 if not place else 3e-7,
        }
        failed = {"state": "failed", "message": "out of memory: it is full (rank 1)"}
        events.append(
            (
                "benchmark_result",
                {**head, **(failed if place == len(match.variants) - 2 else numbers)},
            )
        )
    for number, (type_, data) in enumerate(events):
        runs.event_record(run=run, type=type_, data=data, attempt=1, rank=0, origin=f"1/0/{number}")


@pytest.fixture
def run(owner: User) -> Run:
    made = post(factories.api(owner), RUNS, {"spec": SPEC})
    assert made.status_code == 201, made.content
    answer = made.json()
    assert (answer["name"], answer["kind"]) == ("benchmark llama-tiny", "benchmark") and answer[
        "prediction"
    ]
    match = Run.objects.get(pk=answer["id"])
    assert match.summary == {"step": 0, "steps": 7 * 3 * 5} and match.devices == 2
    factories.running(match, factories.node())
    result(match)
    return match


def test_the_table_grows_and_compares_with_the_base(owner: User, stranger: User, run: Run) -> None:
    client = factories.api(owner)
    table = client.get(f"{RUNS}/{run.pk}/benchmark").json()
    assert [row["state"] for row in table["rows"]] == ["measured"] * 5 + ["failed", "waiting"]
    base, second = table["rows"][:2]
    assert base["id"] == "base" and base["against_base"]["step_time_s"] == 1
    assert second["against_base"]["step_time_s"] == pytest.approx(1.25)
    assert second["against_base"]["peak_bytes"] == pytest.approx(0.5)
    assert (
        second["plan"]["recompute"] == "selective"
        and table["collectives"]["link"]["where"] == "intra"
    )
    assert table["left_out"] and table["products"]["rows"]
    assert factories.api(stranger).get(f"{RUNS}/{run.pk}/benchmark").status_code == 404
    problem(client.get(f"{RUNS}/{factories.run(owner).pk}/benchmark"), 422, "invalid")


def test_wrong_techniques_are_refused_before_anything_runs(owner: User) -> None:
    client = factories.api(owner)
    refused = problem(
        post(
            client, RUNS, {"spec": {**SPEC, "benchmark": {"techniques": ["zeros", "fused_kernel"]}}}
        ),
        422,
        "spec-invalid",
    )
    assert [each["field"] for each in refused["errors"]] == [
        "benchmark.techniques.0",
        "benchmark.techniques.1",
    ]
    assert [each["hint"] for each in refused["errors"]] == ["Use zero.", "Use fused_kernels."]
    assert not Run.objects.exists()
    auto = post(
        client, RUNS, {"spec": {**SPEC, "plan": "auto", "resources": {"devices": 2}}}
    ).json()
    assert auto["plan"]["dp"] * auto["plan"]["tp"] * auto["plan"]["pp"] * auto["plan"]["cp"] == 2


def test_the_page_shows_it_and_the_calibration_takes_it(owner: User, run: Run) -> None:
    browser = factories.client_for(owner)
    page = browser.get(f"/runs/{run.pk}/").content.decode()
    assert "recompute selective" in page and "it is full" in page and "not measured yet" in page
    assert (
        'hx-trigger="every 5s"' in page and "all-reduce" in page and 'value="calibrate"' not in page
    )
    assert "not measured yet" not in browser.get(f"/runs/{run.pk}/?tab=summary").content.decode()

    Run.objects.filter(pk=run.pk).update(state="finished", ended=timezone.now())
    assert 'value="calibrate"' in browser.get(f"/runs/{run.pk}/").content.decode()
    done = browser.post(
        f"/runs/{run.pk}/act/", {"action": "calibrate"}, follow=True
    ).content.decode()
    assert "fitted to 5 measured run" in done
    [row] = Calibration.objects.all()
    group = row.document["groups"][0]
    # 1.6 of the catalogue's 2 GB/s between CPU slots of one node, and the latency as it was
    # measured
    assert group["values"]["intra_efficiency"] == pytest.approx(0.8, rel=0.1)
    assert group["values"]["intra_latency_s"] == pytest.approx(7e-5, rel=0.1)
    assert row.default and group["timed"] == 5
    again = post(
        factories.api(owner), "/api/v1/calibrations", {"name": "by number", "runs": [run.pk]}
    )
    assert again.status_code == 201 and again.json()["rows"] == 5
    assert not RunEvent.objects.filter(run=run, type="prediction_missed").exists()
