"""Reinforcement learning on solved problems: the page with and without a run."""

from __future__ import annotations

import json

import pytest

from orchestrator.accounts.roles import Role
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from webui.views.experiments.solved_problems import SPEC
from workers.contracts import RunSpec
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db
URL = "/experiments/solved-problems/"


def test_without_a_run_the_page_shows_exact_answers(people: factories.People) -> None:
    page = factories.client_for(people.owner).get(URL).content.decode()
    assert "0.4754" in page and "0.4037" in page and "0.3842" in page
    assert "Start the run" in page and "run-source" not in page
    viewer = factories.client_for(factories.user("reader", role=Role.VIEWER))
    page = viewer.get(URL).content.decode()
    assert "Start the run" not in page and "cannot submit runs" in page


def test_one_button_starts_the_run_and_the_page_follows_it(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    page = client.post(f"{URL}start/", follow=True).content.decode()
    run = Run.objects.get()
    assert run.kind == "script" and run.devices == 1
    assert RunSpec.from_dict(SPEC).script is not None
    assert f'"series": "/api/v1/runs/{run.pk}/series"' in page
    values = {"walk/value/3": [0.497], "bandit/objective/k3_loss": [0.3841]}
    batch = PointBatch(
        run=str(run.pk), attempt=1, rank=0, seq=[1], step=[1], tokens=[0], time=[1e9], values=values
    )
    factories.running(run, factories.node("n1"))
    telemetry.points_store(run=run, attempt=1, batches=[batch])
    page = client.get(URL).content.decode()
    assert "0.4970" in page and "0.3841" in page
    panels = json.loads(
        page.split('id="run-panels" type="application/json">')[1].split("</script>")[0]
    )
    [values] = [panel for panel in panels if panel["id"] == "walk-value"]
    assert [round(level["value"], 4) for level in values["levels"]] == [
        0.1667,
        0.3333,
        0.5,
        0.6667,
        0.8333,
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)
    # another run is chosen by the URL, and a stranger sees neither
    client.post(f"{URL}start/")
    assert f"/api/v1/runs/{run.pk}/series" in client.get(f"{URL}?run={run.pk}").content.decode()
    stranger = factories.client_for(people.stranger)
    assert stranger.get(f"{URL}?run={run.pk}").status_code == 404
    assert "run-source" not in stranger.get(URL).content.decode()
