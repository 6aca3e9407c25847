"""From base model to assistant: an experiment's steps, each with the weights of the one before."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from orchestrator.runs.models import Checkpoint, Experiment, Run
from tests import factories
from webui.views.assistant import stages_of
from workers.contracts import RunSpec

pytestmark = pytest.mark.django_db


def offered(stage: Any) -> list[dict[str, Any]]:
    """The specs of a step's forms."""
    queries = [parse_qs(urlparse(each.url).query) for each in stage.offers]
    return [json.loads(query["spec"][0]) for query in queries]


def trained(owner: Any, experiment: Experiment, spec: dict[str, Any], *, state: str) -> Run:
    run = factories.run(owner, name=spec["train"]["objective"])
    Run.objects.filter(pk=run.pk).update(
        spec=spec, kind="train", state=state, experiment=experiment
    )
    run.refresh_from_db()
    return run


def stored(run: Run, step: int) -> str:
    path = f"runs/{run.pk}/checkpoints/step-{step:08d}"
    Checkpoint.objects.create(run=run, attempt=1, step=step, path=path)
    return path


def test_each_step_starts_from_the_weights_of_the_one_before(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    answer = client.post("/experiments/assistant/", follow=True)
    item = Experiment.objects.get()
    assert item.name == "From base model to assistant"
    page = " ".join(answer.content.decode().split())
    assert "0 of 4 steps are done; next: Supervised fine-tuning." in page
    assert page.count("Starts from the weights of step 1") == 3
    stages = stages_of([], item.name)
    for spec in offered(stages[0]):
        RunSpec.from_dict(spec)
    # after fine-tuning, preferences and rewards start from its weights
    sft = trained(people.owner, item, offered(stages[0])[0], state="finished")
    path = stored(sft, 20)
    stages = stages_of([sft], item.name)
    assert stages[0].done and not stages[1].waits
    specs = offered(stages[1])
    assert [each["train"]["objective"] for each in specs] == ["dpo", "grpo"]
    for spec in specs:
        assert spec["train"]["init_from"] == {"path": path}
        RunSpec.from_dict(spec)
    [evaluation] = offered(stages[2])
    assert evaluation["model"] == {"path": path}
    assert evaluation["evaluate"]["baseline"] == sft.spec["train"]["init_from"]
    # after preferences, evaluation compares with the fine-tuned weights
    dpo = trained(people.owner, item, specs[0], state="finished")
    newest = stored(dpo, 20)
    stages = stages_of([dpo, sft], item.name)
    [evaluation] = offered(stages[2])
    assert evaluation["model"] == {"path": newest}
    assert evaluation["evaluate"]["baseline"] == {"path": path}
    [serving] = offered(stages[3])
    assert serving == {"kind": "serve", "model": {"path": newest}, "serve": {}}
    page = client.get(f"/experiments/{item.pk}/assistant/").content.decode()
    assert "2 of 4 steps are done; next: Evaluation." in " ".join(page.split())
    assert f"/runs/{dpo.pk}/" in page
    # a second experiment has a name of its own
    client.post("/experiments/assistant/")
    assert Experiment.objects.filter(name="From base model to assistant 2").exists()


def test_a_stranger_neither_sees_nor_starts_it(people: factories.People) -> None:
    factories.client_for(people.owner).post("/experiments/assistant/")
    item = Experiment.objects.get()
    stranger = factories.client_for(people.stranger)
    assert stranger.get(f"/experiments/{item.pk}/assistant/").status_code == 404
