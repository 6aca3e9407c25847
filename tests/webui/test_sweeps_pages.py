"""Pages of sweeps: list, form, one sweep; empty and full; the drawings."""

from __future__ import annotations

from typing import Any

import pytest
from django.urls import reverse

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.sweeps.advance import sweeps_advance
from orchestrator.sweeps.definition import Parameter
from orchestrator.sweeps.models import Sweep, Trial
from tests import factories
from webui.charts.sweep_charts import best_so_far, parallel_coordinates, place
from webui.forms.sweep_form import INITIAL, parameters_of


class Drawn:
    def __init__(self, number: int, value: float | None, **parameters: Any) -> None:
        self.number, self.value, self.parameters = number, value, parameters
        self.state = "finished" if value is not None else "running"


SPACE = {
    "lr": Parameter(min=1e-4, max=1, scale="log"),
    "layers": Parameter(values=[1, 2, 4]),
}


def test_lines_are_ordered_by_value_and_the_best_is_on_top() -> None:
    trials = [Drawn(n, 5.0 - n, lr=10.0**-n, layers=2) for n in range(1, 5)]
    trials += [Drawn(5, None, lr=0.5, layers=4)]
    drawn = parallel_coordinates(SPACE, trials, metric="loss", minimize=True)
    assert drawn is not None and [axis.title for axis in drawn.axes] == ["lr", "layers", "loss"]
    assert [curve.number for curve in drawn.curves] == [5, 1, 2, 3, 4]
    assert [curve.shade for curve in drawn.curves] == [-1, 3, 2, 1, 0]
    assert len(drawn.curves[0].points.split()) == 2, "no value: not on the last axis"
    assert [tick.label for tick in drawn.axes[0].ticks] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    assert place(SPACE["lr"], 1) < place(SPACE["lr"], 0.01) < place(SPACE["lr"], 1e-4)
    assert parallel_coordinates(SPACE, [], metric="loss", minimize=True) is None
    assert parallel_coordinates(SPACE, trials[:1], metric="loss", minimize=True) is not None


def test_the_best_so_far_never_gets_worse() -> None:
    trials = [Drawn(1, 3.0), Drawn(2, 4.0), Drawn(3, None), Drawn(4, 1.0)]
    drawn = best_so_far(trials, minimize=True)
    assert drawn is not None and len(drawn.dots) == 3 and (drawn.first, drawn.last) == (1, 4)
    ys = [float(point.split(",")[1]) for point in drawn.line.split()]
    assert ys == sorted(ys) and ys[0] < ys[-1], "lower values are lower"
    assert best_so_far(trials[2:3], minimize=True) is None


def test_parameters_are_read_from_lines() -> None:
    text = "train.optimizer.lr = 1e-4 .. 0.1 log 5\n\ntrain.seed = 1,2, 3\n"
    text += "plan.schedule = 1f1b, gpipe\n"
    assert parameters_of(text + "train.steps=1..9 integer") == {
        "train.optimizer.lr": {"min": 1e-4, "max": 0.1, "scale": "log", "points": 5},
        "train.seed": {"values": [1, 2, 3]},
        "plan.schedule": {"values": ["1f1b", "gpipe"]},
        "train.steps": {"min": 1, "max": 9, "integer": True},
    }


@pytest.mark.django_db
def test_a_sweep_is_started_shown_and_cancelled(owner: User, live_redis: str) -> None:
    client = factories.client_for(owner)
    assert b"No sweeps yet" in client.get(reverse("sweeps")).content
    form = client.get(reverse("sweep-new"))
    assert b"train.optimizer.lr = 1e-4" in form.content
    bad = client.post(reverse("sweep-new"), {**INITIAL, "name": "x", "parameters": "lr 1..2"})
    assert bad.status_code == 422 and b"is not a parameter" in bad.content
    bad = client.post(reverse("sweep-new"), {**INITIAL, "name": "x", "parameters": "train.lr = 1"})
    assert bad.status_code == 422 and b"parameters.train.lr" in bad.content
    bad = client.post(reverse("sweep-new"), {**INITIAL, "name": "x", "runs": "many"})
    assert bad.status_code == 422 and b"budget.runs" in bad.content
    for method in ("asha", "pbt", "tpe"):
        made = client.post(reverse("sweep-new"), {**INITIAL, "name": method, "method": method})
        assert made.status_code == 302, made.content
    sweep = Sweep.objects.get(name="tpe")
    page = client.get(reverse("sweep", args=[sweep.pk])).content.decode()
    assert "0 of 12 runs; no run has ended yet." in page and "No trials yet" in page
    sweeps_advance()
    for trial in Trial.objects.filter(sweep=sweep):
        Trial.objects.filter(pk=trial.pk).update(value=2.0 + trial.number, step=100)
    page = client.get(reverse("sweep", args=[sweep.pk])).content.decode()
    assert "2 of 12 runs, 2 active; best loss 3 by trial 1." in page
    assert page.count('class="trial ') == 2 and "best-line" in page
    run = Trial.objects.get(sweep=sweep, number=1).run
    assert run is not None
    own = client.get(reverse("run", args=[run.pk])).content.decode()
    assert "trial 1 of sweep tpe" in own and reverse("sweep", args=[sweep.pk]) in own
    part = client.get(reverse("sweep", args=[sweep.pk]), headers={"HX-Request": "true"})
    assert b"<html" not in part.content
    listed = client.get(reverse("sweeps")).content.decode()
    assert "3 sweeps, 3 running." in " ".join(listed.split())
    cancelled = client.post(reverse("sweep-cancel", args=[sweep.pk]), follow=True)
    assert b"Sweep cancelled." in cancelled.content
    assert {run.state for run in Run.objects.filter(trial__sweep=sweep)} == {"cancelled"}
    like = Run.objects.filter(trial__sweep=sweep).first()
    assert like is not None
    form = client.get(reverse("sweep-new"), {"run": like.pk})
    assert b"sweep-" in form.content and like.name.encode() in form.content
