"""Blocks of panels: live, frozen, embedded for links, and limited to the runs of their readers."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import Team, User
from orchestrator.common.errors import Refusal
from orchestrator.reports import block_data, services, share_links
from orchestrator.reports.blocks import blocks_in
from orchestrator.reports.models import FrozenPanel
from orchestrator.reports.panel_blocks import without_runs
from orchestrator.reports.readers import Readers
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db
LINE = "```panel\nkind: line\nmetrics: [loss]\nruns: {query: kind = external}\n```"


def logged(run: Run, *values: float) -> Run:
    steps = list(range(1, 1 + len(values)))
    batch = PointBatch(
        run=str(run.pk),
        attempt=1,
        rank=0,
        seq=steps,
        step=steps,
        tokens=steps,
        time=[float(step) for step in steps],
        values={"loss": list(values)},
    )
    telemetry.points_store(run=run, attempt=1, batches=[batch])
    telemetry.summaries_refresh(limit=9, wait=False)
    return run


def data_of(text: str, *users: User, report: Any = None) -> block_data.BlockData:
    readers = Readers(users, anonymous=len(users) > 1)
    blocks = blocks_in(text)
    stored = block_data.stored_blocks(report=report, blocks=blocks)
    return block_data.read(block=blocks[0], readers=readers, stored=stored.get(blocks[0].key))


def curves(shown: block_data.BlockData) -> dict[str, list[Any]]:
    content = shown.data["panels"][0]["data"]["content"]
    return {curve["run"]: curve["y"] for curve in content.get("curves", [])}


def test_a_live_panel_of_a_person_is_read_by_the_browser(people: factories.People) -> None:
    logged(factories.external_run(people.owner), 3.0, 2.0)
    shown = data_of(LINE, people.owner)
    (panel,) = shown.data["panels"]
    assert panel["spec"]["metrics"] == ["loss"] and "data" not in panel


def test_a_frozen_panel_keeps_its_points(people: factories.People) -> None:
    run = logged(factories.external_run(people.owner), 3.0, float("nan"))
    text = LINE.replace("```panel", "```panel frozen 2026-01-15", 1)
    report = services.report_create(owner=people.owner, title="t", text=text)
    stored = FrozenPanel.objects.get()
    assert stored.runs == [run.pk]
    logged(factories.external_run(people.owner), 1.0)
    shown = data_of(text, people.teammate, report=report)
    assert curves(shown) == {str(run.pk): [3.0, "NaN"]} and shown.frozen == stored.created
    # a reader outside of the team of the run sees neither its points nor its name
    hidden = data_of(text, people.stranger, report=report)
    (panel,) = hidden.data["panels"]
    assert panel["data"]["runs"] == [] and panel["data"]["empty"]["code"] == "no_source"
    assert hidden.hidden == 1 and "content" in panel["data"] and not panel["data"]["content"]


def test_a_pattern_makes_a_panel_per_match(people: factories.People) -> None:
    logged(factories.external_run(people.owner), 3.0)
    text = LINE.replace("metrics: [loss]", 'pattern: "^lo"').replace("panel", "panel frozen", 1)
    report = services.report_create(owner=people.owner, title="t", text=text)
    shown = data_of(text, people.owner, report=report)
    assert [one["spec"]["metrics"] for one in shown.data["panels"]] == [["loss"]]


def test_readers_of_a_link_see_the_runs_of_both_authors(people: factories.People) -> None:
    own = logged(factories.external_run(people.teammate, name="lab run"), 2.0)
    other = factories.user("other")
    Team.objects.create(name="rivals").members.add(people.owner, other)
    foreign = logged(factories.external_run(other, name="rival run"), 1.0)
    assert curves(data_of(LINE, people.owner, people.owner)).keys() == {
        str(own.pk),
        str(foreign.pk),
    }
    both = data_of(LINE, people.owner, people.teammate)
    assert curves(both).keys() == {str(own.pk)}
    assert both.data["panels"][0]["data"]["hidden_runs"] == 1
    report = services.report_create(owner=people.owner, title="t", text=LINE)
    services.report_update(report=report, by=people.teammate, version=1, title="u")
    link = share_links.link_create(report=report, by=people.owner)
    page = Client().get(share_links.link_path(link)).content.decode()
    assert "lab run" in page and "rival run" not in page and "panel-data" in page


def test_pictures_are_embedded(people: factories.People) -> None:
    run = factories.external_run(people.owner)
    factories.image_item(run)
    text = f"```panel frozen\nkind: image\nmetrics: [sample]\nruns: {{runs: [{run.pk}]}}\n```"
    report = services.report_create(owner=people.owner, title="t", text=text)
    shown = data_of(text, people.owner, report=report)
    (item,) = shown.data["panels"][0]["data"]["content"]["items"]
    assert item["image"]["url"].startswith("data:image/png;base64,iVBOR")


def test_parts_of_hidden_runs_are_left_out() -> None:
    runs = [{"id": "1", "name": "a", "state": "running"}, {"id": "2", "name": "b", "state": "x"}]
    base = {"runs": runs, "hidden_runs": 0, "missing": [], "empty": None}

    def seen(content: dict[str, Any], *ids: int) -> dict[str, Any]:
        data = {"panels": [{"spec": {}, "data": {**base, "content": content}}]}
        shown: dict[str, Any] = without_runs(data, frozenset(ids))["panels"][0]["data"]
        return shown

    heat = {"of": "metrics", "rows": [{"run": "1"}, {"run": "2"}], "z": [[1], [2]], "x": [0, 1]}
    assert seen(heat, 2)["content"] == {**heat, "rows": [{"run": "2"}], "z": [[2]]}
    one = {"of": "histograms", "rows": [{"run": "1"}], "z": [[1], [2]], "x": [0], "y": [0, 1, 2]}
    assert seen(one, 1)["content"] == one
    assert seen(one, 2)["content"] == {}
    summed = {"of": "values", "edges": [0, 1], "counts": [2]}
    assert seen(summed, 1, 2)["content"] == summed
    assert seen(summed, 1)["content"] == {} and seen(summed, 1)["empty"]["code"] == "no_source"
    bars = {"bars": [{"run": "1", "value": 1}, {"run": "2", "value": 2}]}
    shown = seen(bars, 2)
    assert shown["content"]["bars"] == [{"run": "2", "value": 2}] and shown["hidden_runs"] == 1
    assert [run["id"] for run in shown["runs"]] == ["2"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("metrics: [loss]", "kind"),
        ("kind: pie\nmetrics: [loss]", "kind"),
        ("kind: line", "shows no metric"),
        ('kind: line\npattern: "("', "at character"),
        ("kind: line\nmetrics: [loss]\nruns: {}", "exactly one of"),
        ("kind: line\nmetrics: [loss]\ncolour: red", "colour"),
    ],
)
def test_wrong_panels_name_the_line_and_the_field(owner: User, body: str, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        services.report_create(owner=owner, title="t", text=f"Text.\n\n```panel\n{body}\n```")
    problem = caught.value.errors[0]["message"]
    assert problem.startswith("line 3: ") and message in problem
