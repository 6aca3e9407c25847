"""Experiment pages: creation, safe notes, the best run, and who may edit."""

from __future__ import annotations

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs import services
from orchestrator.runs.models import Experiment, Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from webui.presentation.markdown import render_markdown
from workers.contracts.wire.points import PointBatch


def logged(run: Run, **values: list[float | None]) -> Run:
    steps = list(range(1, 1 + len(next(iter(values.values())))))
    batch = PointBatch(
        run=str(run.pk),
        attempt=1,
        rank=0,
        seq=steps,
        step=steps,
        tokens=steps,
        time=[float(one) for one in steps],
        values=values,
    )
    telemetry.points_store(run=run, attempt=1, batches=[batch])
    return run


@pytest.mark.django_db
def test_a_question_is_opened_edited_and_refused_twice(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    typed = {"name": "Is 3e-3 best?", "hypothesis": "yes", "notes": "# Why\r\n\r\n*because*"}
    answer = client.post("/experiments/new/", typed, follow=True)
    page = answer.content.decode()
    assert (
        "Experiment Is 3e-3 best? created." in page
        and "<em>because</em>" in page
        and "No runs yet" in page
    )
    made = Experiment.objects.get()
    assert made.notes == "# Why\n\n*because*"
    again = client.post("/experiments/new/", typed)
    assert again.status_code == 409 and "Choose another name" in again.content.decode()
    assert 'value="Is 3e-3 best?"' in again.content.decode()
    address = f"/experiments/{made.pk}/edit/"
    client.post(address, {"hypothesis": "no", "notes": ""})
    made.refresh_from_db()
    assert (made.name, made.hypothesis, made.notes) == ("Is 3e-3 best?", "no", "")
    for person, status in ((people.teammate, 403), (people.stranger, 404), (people.operator, 200)):
        assert factories.client_for(person).get(address).status_code == status
    assert (
        factories.client_for(people.teammate).post(address, {"hypothesis": "x"}).status_code == 403
    )
    made.refresh_from_db()
    assert made.hypothesis == "no"


@pytest.mark.django_db
def test_who_may_only_look_opens_none(stranger: User) -> None:
    client = factories.client_for(stranger)
    assert "New experiment" not in client.get("/experiments/?q=x").content.decode()
    assert client.post("/experiments/new/", {"name": "mine"}).status_code == 403
    assert not Experiment.objects.exists()


@pytest.mark.django_db
def test_the_best_run_is_the_one_validated_lowest(owner: User) -> None:
    question = services.experiment_create(owner=owner, name="question")
    client = factories.client_for(owner)

    def run(name: str) -> Run:
        return services.run_submit(
            owner=owner, name=name, spec=factories.spec(), experiment=question
        )

    logged(run("trains only"), loss=[3.0, 0.5])
    assert (
        "best so far: loss 0.5000 by run"
        in client.get(f"/experiments/{question.pk}/").content.decode()
    )
    best = logged(run("dips"), loss=[3.0, 2.0, 2.9], val_loss=[None, 1.25, 1.75])
    logged(run("ends lower"), loss=[3.0, 1.0], val_loss=[2.5, 1.5])
    logged(run("broken"), loss=[3.0, float("nan")])
    page = client.get(f"/experiments/{question.pk}/").content.decode()
    assert f"4 runs; best so far: validation loss 1.25 by run {best.pk} dips." in page.replace(
        "1.250", "1.25"
    )
    assert page.count('<span class="badge good">best</span>') == 1
    listed = client.get("/experiments/").content.decode()
    assert "1 experiment, 4 runs." in listed and ">dips</a>" in listed


@pytest.mark.django_db
def test_each_objective_is_ranked_by_its_own_metric(owner: User) -> None:
    question = services.experiment_create(owner=owner, name="question")
    client = factories.client_for(owner)

    def run(name: str, objective: str, **values: list[float | None]) -> Run:
        made = factories.run(owner, name=name)
        spec = {**made.spec, "train": {**made.spec["train"], "objective": objective}}
        Run.objects.filter(pk=made.pk).update(spec=spec, experiment=question)
        return logged(made, **values)

    text = run("text", "sft", loss=[3.0, 0.9])
    run("wide margins", "dpo", loss=[0.1, 0.05], **{"dpo/accuracy": [0.5, 0.7]})
    pairs = run("right pairs", "dpo", loss=[0.7, 0.6], **{"dpo/accuracy": [0.5, 0.8]})
    score = run("score", "reward", loss=[0.6, 0.5], **{"reward/accuracy": [0.5, 0.75]})
    poor = run("low loss", "grpo", loss=[0.0, -9.0], **{"reward/mean": [0.1, 0.3]})
    rich = run("high reward", "ppo", loss=[0.4, 0.4], **{"reward/mean": [0.1, 0.6]})
    page = client.get(f"/experiments/{question.pk}/").content.decode()
    assert f"6 runs; best so far: reward 0.6000 by run {rich.pk} high reward." in page
    assert page.count('<span class="badge good">best</span>') == 4
    card = page.split('id="best"')[1].split("</section>")[0]
    for best in (text, pairs, score, rich):
        assert f"/runs/{best.pk}/" in card
    assert f"/runs/{poor.pk}/" not in card
    listed = client.get("/experiments/").content.decode()
    assert ">high reward</a>" in listed and '<span class="muted">reward</span> 0.6000' in listed


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;", "<script"),
        ('<img src=x onerror="alert(1)">', "&lt;img", "<img"),
        ("[x](javascript:alert(1))", "[x]", "<a"),
        ("[x](data:text/html,hi)", "[x]", "<a"),
        ("![x](https://elsewhere.example/pixel.png)", "x", "<img"),
        ("[x](https://example.org)", 'rel="noopener noreferrer nofollow"', "<script"),
        ("# big", "<h3>big</h3>", "<h1>"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "<table>", "|"),
    ],
)
def test_notes_cannot_hurt(text: str, has: str, lacks: str) -> None:
    made = render_markdown(text)
    assert has in made and lacks not in made
