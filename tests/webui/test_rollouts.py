"""Sampled answers of reinforcement learning runs, on the run's page and by REST."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from tests import factories

pytestmark = pytest.mark.django_db

POLICY = {
    "kind": "train",
    "model": "llama-tiny",
    "train": {
        "objective": "grpo",
        "steps": 4,
        "seq_len": 64,
        "grpo": {"rewards": [{"kind": "exact"}]},
    },
}


def policy_run(owner: Any) -> Run:
    run = factories.run(owner, name="reverse")
    Run.objects.filter(pk=run.pk).update(spec=POLICY, kind="train")
    run.refresh_from_db()
    return run


def sampled(run: Run, step: int, text: str, *, attempt: int = 1, failure: str = "") -> None:
    answers = [
        {"text": "bad", "tokens": 3, "reward": 0.0, "rewards": {"exact": 0.0}, "advantage": -0.5},
        {
            "text": text,
            "tokens": 4,
            "reward": 1.0,
            "rewards": {"exact": 1.0},
            "advantage": 1.5,
            "failure": failure,
        },
    ]
    group = {"prompt_id": 7, "prompt": "12 <b>", "expected": "21", "answers": answers}
    equal = {"prompt_id": 8, "prompt": "33", "learned": False, "answers": [{"text": "33"}]}
    data = {"step": step, "weight_version": step - 1, "groups": [group, equal]}
    runs.event_record(
        run=run,
        type="rollouts_sampled",
        data=data,
        attempt=attempt,
        rank=0,
        origin=f"{attempt}/{step}",
    )


def test_the_page_shows_answers_by_step(people: factories.People) -> None:
    run = policy_run(people.owner)
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert f"/runs/{run.pk}/rollouts/" in page and f"/runs/{run.pk}/samples/" not in page
    empty = client.get(f"/runs/{run.pk}/rollouts/").content.decode()
    assert "The first answers follow" in empty
    sampled(run, 1, "early", failure="judge: is down")
    sampled(run, 2, "late<i>")
    html = client.get(f"/runs/{run.pk}/rollouts/").content.decode()
    assert "late&lt;i&gt;" in html and "early" not in html and "12 &lt;b&gt;" in html
    assert html.index("late") < html.index(">bad<")  # the best first
    assert "+1.50" in html and "-0.50" in html and "nothing is learned from this group" in html
    assert "weights after update 1." in html
    first = client.get(f"/runs/{run.pk}/rollouts/?at=0").content.decode()
    assert "early" in first and "judge: is down" in first
    assert 'hx-trigger="never"' in first  # does not jump to the newest while one reads
    for odd in ("-1", "99", "x", "1" * 30):
        assert client.get(f"/runs/{run.pk}/rollouts/?at={odd}").status_code == 200


def test_rest_lists_rollouts_without_discarded_steps(people: factories.People) -> None:
    run = policy_run(people.owner)
    sampled(run, 1, "first")
    sampled(run, 2, "discarded")
    sampled(run, 2, "again", attempt=2)
    runs.event_record(run=run, type="rollouts_sampled", data={"step": "x"}, origin="odd")
    api = factories.api(people.owner)
    items = api.get(f"/api/v1/runs/{run.pk}/rollouts").json()["items"]
    texts = [(each["step"], each["groups"][0]["answers"][1]["text"]) for each in items]
    assert texts == [(1, "first"), (2, "again")]
    assert items[0]["weight_version"] == 0 and items[0]["groups"][0]["expected"] == "21"
    stranger = factories.api(people.stranger)
    assert stranger.get(f"/api/v1/runs/{run.pk}/rollouts").status_code in (403, 404)


def test_tokens_are_colored_by_their_own_advantages(people: factories.People) -> None:
    """Of PPO; an answer of several versions of the weights says so."""
    run = policy_run(people.owner)
    pieces = [{"text": "<1", "advantage": 2.0}, {"text": "2", "advantage": -1.0}]
    answer = {"text": "<12", "pieces": pieces, "first_version": 3, "last_version": 5}
    data = {"step": 6, "weight_version": 3, "groups": [{"prompt": "p", "answers": [answer]}]}
    runs.event_record(run=run, type="rollouts_sampled", data=data, attempt=1, rank=0, origin="1/6")
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/rollouts/").content.decode()
    good = '<span class="token good" style="--strength: 100%" title="+2.00">&lt;1</span>'
    bad = '<span class="token bad" style="--strength: 50%" title="-1.00">2</span>'
    assert good + bad in page
    assert "weights 3 – 5" in " ".join(page.split())
