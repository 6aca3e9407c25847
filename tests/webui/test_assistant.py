"""From base model to assistant: an experiment's steps, each with the weights of the one before."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlencode, urlparse

import pytest

from orchestrator.runs import services
from orchestrator.runs.models import Checkpoint, Experiment, Run
from tests import factories
from webui.views.experiments.assistant import stages_of
from workers.contracts import RunSpec
from workers.contracts.wire.serving_reports import EVALUATED

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
    serving = [{"kind": "serve", "model": {"path": each}, "serve": {}} for each in (newest, path)]
    assert offered(stages[3]) == serving
    # a later run that stored no weights does not replace one that did
    without = trained(people.owner, item, specs[0], state="finished")
    assert stages_of([without, dpo, sft], item.name)[1].run == dpo
    without.delete()
    page = client.get(f"/experiments/{item.pk}/assistant/").content.decode()
    assert "2 of 4 steps are done; next: Evaluation." in " ".join(page.split())
    assert f"/runs/{dpo.pk}/" in page
    # two served models can be compared side by side
    for _ in range(2):
        served = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
        Run.objects.filter(pk=served.pk).update(state="running", experiment=item)
    served.refresh_from_db()
    last = stages_of([*Run.objects.filter(kind="serve"), dpo, sft], item.name)[3]
    assert last.done and last.offers[-1].url == "/data/comparisons/"
    # a second experiment has a name of its own
    client.post("/experiments/assistant/")
    assert Experiment.objects.filter(name="From base model to assistant 2").exists()


def test_forms_leave_the_model_to_the_initial_weights(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    first = stages_of([], "e")[0]
    for offer, spec in zip(first.offers, offered(first), strict=True):
        answer = client.get(offer.url)
        assert json.loads(answer.context["spec_text"]) == spec
        assert "model" not in spec
    # without weights, the form's own model
    query = urlencode({"spec": json.dumps({"kind": "train", "train": {"steps": 3}})})
    answer = client.get(f"/runs/new/?{query}")
    assert json.loads(answer.context["spec_text"])["model"] == "llama-tiny"


def test_rewards_are_evaluated_on_their_prompts(people: factories.People) -> None:
    item = Experiment.objects.create(name="x", owner=people.owner)
    first = offered(stages_of([], item.name)[0])[0]
    sft = trained(people.owner, item, first, state="finished")
    before = stored(sft, 20)
    _, spec = offered(stages_of([sft], item.name)[1])
    grpo = trained(people.owner, item, spec, state="finished")
    newest = stored(grpo, 20)
    [evaluation] = offered(stages_of([grpo, sft], item.name)[2])
    assert evaluation["data"]["path"] == "examples/reverse.jsonl"
    assert evaluation["evaluate"] == {
        "metrics": ["loss", "exact_match"],
        "baseline": {"path": before},
        "max_new_tokens": 32,
    }
    assert evaluation["model"] == {"path": newest}
    RunSpec.from_dict(evaluation)
    # the result is on the page
    run = factories.run(people.owner, kind="evaluate", train=None, plan={}, evaluate={})
    Run.objects.filter(pk=run.pk).update(state="finished", experiment=item)
    compared = {"name": "exact_match", "before": 0.5, "after": 0.9, "p": 0.001, "verdict": "better"}
    data = {"metrics": {"exact_match": 0.9}, "lines": 40, "model": "b", "baseline": "a"}
    services.event_record(run=run, type=EVALUATED, data={**data, "compared": [compared]}, attempt=1)
    page = factories.client_for(people.owner).get(f"/experiments/{item.pk}/assistant/")
    assert "Better in" in page.content.decode()


def test_a_stranger_neither_sees_nor_starts_it(people: factories.People) -> None:
    factories.client_for(people.owner).post("/experiments/assistant/")
    item = Experiment.objects.get()
    stranger = factories.client_for(people.stranger)
    assert stranger.get(f"/experiments/{item.pk}/assistant/").status_code == 404
