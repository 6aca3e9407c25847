"""Pages of reviews and side-by-side chats: empty, full, and refused forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.roles import Role
from orchestrator.reviews import services
from orchestrator.reviews.models import ModelComparison, Review, ReviewedFile
from tests import factories
from tests.webui.pages import compact

pytestmark = pytest.mark.django_db
LINE = {
    "messages": [
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
    ]
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> Path:
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path / "home"})
    return tmp_path


def test_a_review_is_begun_written_and_deleted(people: factories.People, data_root: Path) -> None:
    client = factories.client_for(people.owner)
    assert "No reviews yet" in client.get("/data/reviews/").content.decode()
    (data_root / "a.jsonl").write_text(json.dumps(LINE) + "\n" + json.dumps(LINE) + "\n")
    refused = client.post("/data/reviews/", {"path": "gone.jsonl"})
    assert refused.status_code == 422 and "does not exist" in refused.content.decode()
    assert client.post("/data/reviews/", {"run": "x"}).status_code == 422
    begun = client.post("/data/reviews/", {"path": "a.jsonl", "name": "First look"})
    row = Review.objects.get()
    assert begun.status_code == 302 and begun["Location"] == f"/data/reviews/{row.pk}/"
    page = compact(client.get(begun["Location"]).content.decode())
    assert "2 lines, none decided yet." in page and 'data-key="k"' in page
    assert "edits as pairs" in page and "Delete this review" in page
    services.line_change(
        review=row, line=2, version=0, by=people.teammate, edit=services.LineEdit("keep", 4)
    )
    page = compact(client.get(begun["Location"]).content.decode())
    assert "1 of 2 lines decided: 1 kept." in page and "<dt>teammate</dt>" in page
    none = client.post(f"/data/reviews/{row.pk}/write/", {"min_rating": "5"})
    assert none.status_code == 409 and not ReviewedFile.objects.exists()
    assert client.post(f"/data/reviews/{row.pk}/write/", {"min_rating": "9"}).status_code == 422
    done = client.post(f"/data/reviews/{row.pk}/write/", {"min_rating": "4"}, follow=True)
    shown = done.content.decode()
    assert "1 line written to" in shown and "/data/?path=" in shown
    listed = compact(client.get("/data/reviews/").content.decode())
    assert "First look" in listed and "1 / 2" in listed
    viewer = factories.user("viewer", Role.VIEWER)
    factories.Team.objects.get(name="lab").members.add(viewer)
    seen = factories.client_for(viewer).get(begun["Location"]).content.decode()
    assert "require the role submitter" in seen and 'data-key="k"' not in seen
    client.post(f"/data/reviews/{row.pk}/delete/")
    assert not Review.objects.exists() and ReviewedFile.objects.get().review is None


def test_votes_are_shown_with_their_interval(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    assert "No model is served" in client.get("/data/comparisons/").content.decode()
    refused = client.post("/data/comparisons/", {"left": "1", "right": ""})
    assert refused.status_code == 422 and "choose a served model" in refused.content.decode()
    number = client.post("/data/comparisons/", {"left": "1", "right": "2", "top_p": "x"})
    assert "x is not a number" in number.content.decode()
    row = ModelComparison.objects.create(
        owner=people.owner, runs=[3, 4], model_ids=["small", "large"]
    )
    empty = client.get(f"/data/comparisons/{row.pk}/").content.decode()
    assert "No votes yet" in empty and "disabled" in empty
    for number, choice in enumerate(["a", "a", "b", "tie", ""]):
        row.turns.create(
            conversation=number,
            messages=[{"role": "user", "content": f"question <{number}>"}],
            answers=["one", "two"],
            first_model=number % 2,
            choice=choice,
            by="owner",
        )
    page = compact(client.get(f"/data/comparisons/{row.pk}/").content.decode())
    assert "question &lt;3&gt;" in page and "question &lt;4&gt;" not in page, "no vote, no names"
    # large won its turn as a, and small won as a; the third vote was for b, which is large
    assert "<b>62%</b>" in page or "<b>62.5%</b>" in page, page.split("<b>")[1:3]
    assert "no clear winner" in page
    assert "Side-by-side chat" in client.get("/data/").content.decode()
