"""Reviews by REST: copies, decisions of several people, long files, data sets with lineage."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.reviews import source
from orchestrator.reviews.models import LineChange, Review, ReviewedFile
from tests import factories
from workers.contracts.examples.formats import parse_line

pytestmark = pytest.mark.django_db
JSON = "application/json"


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path / "home"})
    return tmp_path / "home"


def line(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}+1?"},
            {"role": "assistant", "content": f"{number + 1}"},
        ]
    }


def edited(number: int, answer: str) -> dict[str, Any]:
    content = line(number)
    content["messages"][1]["content"] = answer
    return content


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": "yes", "rejected": "no"}


def write(path: Path, lines: list[dict[str, Any]], end: str = "\n") -> None:
    path.write_text("\n".join(json.dumps(each) for each in lines) + end)


def begin(client: Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/api/v1/reviews", body, content_type=JSON)
    assert answer.status_code == 201, answer.content
    review: dict[str, Any] = answer.json()
    return review


def decide(client: Client, review: dict[str, Any], line: int, version: int, **change: Any) -> Any:
    address = f"/api/v1/reviews/{review['id']}/lines/{line}"
    return client.patch(address, {"version": version, **change}, content_type=JSON)


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in Path(path).read_text().splitlines()]


def test_decisions_become_a_data_set_with_lineage(
    people: factories.People, home: Path, data_root: Path
) -> None:
    write(data_root / "sums.jsonl", [line(n) for n in range(1, 7)], end="")
    owner, mate = factories.api(people.owner), factories.api(people.teammate)
    review = begin(owner, path="sums.jsonl")
    assert (review["lines"], review["format"], review["name"]) == (6, "messages", "sums.jsonl")
    (data_root / "sums.jsonl").unlink()  # the review has a copy
    assert decide(owner, review, 1, 0, decision="keep", rating=5).json()["version"] == 1
    assert (
        decide(mate, review, 2, 0, content=edited(2, "three"), decision="keep").status_code == 200
    )
    assert decide(owner, review, 3, 0, decision="drop").status_code == 200
    decide(owner, review, 4, 0, content=edited(4, "five"), note="digits are fine")
    decide(owner, review, 4, 1, content=None, decision="keep")

    shown = owner.get(f"/api/v1/reviews/{review['id']}").json()
    assert shown["counts"] == {"keep": 3, "drop": 1, "swap": 0, "undecided": 2, "edited": 1}
    assert [(each["by"], each["changes"]) for each in shown["reviewers"]] == [
        ("owner", 4),
        ("teammate", 1),
    ]
    answer = owner.post(f"/api/v1/reviews/{review['id']}/data-sets", {}, content_type=JSON)
    data_set = answer.json()
    assert data_set["path"] == str(data_root / "reviewed" / "sums.jsonl")
    lines = read(data_set["path"])
    assert [each["messages"][1]["content"] for each in lines] == ["2", "three", "5"]
    lineage = lines[1]["review"]
    assert (lineage["line"], lineage["by"], lineage["edited"]) == (2, "teammate", True)
    assert lineage["sha256"] == review["sha256"] and lineage["source"].endswith("sums.jsonl")
    assert parse_line(json.dumps(lines[1]), "messages").shape == "answers"
    again = {"undecided": "keep", "min_rating": 5}
    second = owner.post(f"/api/v1/reviews/{review['id']}/data-sets", again, content_type=JSON)
    assert second.json()["path"].endswith("sums-2.jsonl") and second.json()["lines"] == 1
    pairs = owner.post(
        f"/api/v1/reviews/{review['id']}/data-sets",
        {"writes": "edits_as_pairs"},
        content_type=JSON,
    ).json()
    [one] = read(pairs["path"])
    assert (one["chosen"][0]["content"], one["rejected"][0]["content"]) == ("three", "3")
    assert parse_line(json.dumps(one), "preference").shape == "pairs"
    listed = owner.get(f"/api/v1/reviews/{review['id']}/data-sets").json()["items"]
    assert len(listed) == 3
    download = f"/api/v1/reviews/{review['id']}/data-sets/{data_set['id']}/download"
    assert b"".join(owner.get(download)).count(b"\n") == 3  # type: ignore[arg-type]


def test_two_people_lose_no_edit(people: factories.People, home: Path, data_root: Path) -> None:
    write(data_root / "a.jsonl", [line(n) for n in range(1, 4)])
    owner, mate = factories.api(people.owner), factories.api(people.teammate)
    review = begin(owner, path="a.jsonl")
    assert decide(owner, review, 1, 0, content=edited(1, "mine")).status_code == 200
    for version in (0, 7):
        refused = decide(mate, review, 1, version, decision="drop")
        assert refused.status_code == 409 and "changed by owner" in refused.json()["detail"]
    seen = mate.get(f"/api/v1/reviews/{review['id']}/lines/1").json()
    assert seen["content"] == edited(1, "mine") and seen["original"] == line(1)
    assert decide(mate, review, 1, seen["version"], decision="drop").status_code == 200
    changes = owner.get(f"/api/v1/reviews/{review['id']}/lines/1/changes").json()["items"]
    assert [(each["by"], each["content"]["decision"]) for each in changes] == [
        ("owner", ""),
        ("teammate", "drop"),
    ]
    assert changes[1]["content"]["edited"] == edited(1, "mine"), "the edit stays"
    assert LineChange.objects.count() == 2

    # each gets a line of their own, and the last is free again when it is undecided
    address = f"/api/v1/reviews/{review['id']}/next"
    claimed = [
        client.post(address, {}, content_type=JSON).json()["line"] for client in (owner, mate)
    ]
    assert claimed == [2, 3]
    third = factories.user("third")
    factories.Team.objects.get(name="lab").members.add(third)
    answer = factories.api(third).post(address, {}, content_type=JSON)
    assert answer.json()["line"] is None


def test_pairs_are_swapped_or_dropped(
    people: factories.People, home: Path, data_root: Path
) -> None:
    write(data_root / "pairs.jsonl", [pair(n) for n in range(1, 4)])
    owner = factories.api(people.owner)
    review = begin(owner, path="pairs.jsonl", name="Which is better?")
    for number, decision in enumerate(("keep", "swap", "drop"), 1):
        assert decide(owner, review, number, 0, decision=decision).status_code == 200
    made = owner.post(f"/api/v1/reviews/{review['id']}/data-sets", {}, content_type=JSON).json()
    assert made["format"] == "preference" and made["path"].endswith("/Which-is-better.jsonl")
    assert [(each["prompt"], each["chosen"]) for each in read(made["path"])] == [
        ("1?", "yes"),
        ("2?", "no"),
    ]


def test_a_long_file_is_read_page_by_page(
    people: factories.People, home: Path, data_root: Path
) -> None:
    count = 100_000
    text = json.dumps(line(1)) + "\n"
    (data_root / "long.jsonl").write_text(text * (count - 1) + json.dumps(line(5)) + "\n")
    owner = factories.api(people.owner)
    review = begin(owner, path="long.jsonl")
    assert review["lines"] == count
    address = f"/api/v1/reviews/{review['id']}/lines"
    page = owner.get(address, {"cursor": str(count - 2), "limit": "2"}).json()
    assert [each["line"] for each in page["items"]] == [count - 2, count - 1]
    assert page["next_cursor"] == str(count)
    last = owner.get(address, {"cursor": str(count)}).json()
    assert last["items"][0]["content"] == line(5) and last["next_cursor"] is None
    for number in (1, 2, 4):
        decide(owner, review, number, 0, decision="keep")
    undecided = owner.get(address, {"show": "undecided", "limit": "3"}).json()
    assert [each["line"] for each in undecided["items"]] == [3, 5, 6]
    assert undecided["next_cursor"] == "7"
    chosen = owner.get(address, {"show": "keep", "cursor": "2"}).json()
    assert [each["line"] for each in chosen["items"]] == [2, 4]
    assert owner.get(address, {"cursor": "x"}).status_code == 422


def test_what_cannot_be_reviewed_is_refused(
    people: factories.People, home: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = factories.api(people.owner)
    (data_root / "odd.jsonl").write_text(json.dumps(line(1)) + '\n{"messages": []}\n')
    good = json.dumps(line(1)) + "\n"
    (data_root / "late.jsonl").write_text(good * 300 + "\n[1]\n")
    (data_root / "half.jsonl").write_text(json.dumps(pair(1)) + "\n" + '{"chosen": "a"}\n')
    monkeypatch.setattr(source, "MOST_LINE_BYTES", 1 << 20)
    (data_root / "wide.jsonl").write_text(good + "x" * (1 << 21) + "\n")
    (data_root / "text.jsonl").write_text('{"text": "no example"}\n')
    (data_root / "blank.jsonl").write_text("\n")
    run = factories.run(people.owner)
    for body, message in (
        ({"path": "odd.jsonl"}, "line 2: messages is not a list"),
        ({"path": "late.jsonl"}, "line 302: not an object"),
        ({"path": "half.jsonl"}, "line 2: has no field rejected"),
        ({"path": "wide.jsonl"}, "line 2 is longer than 1 MiB"),
        ({"path": "text.jsonl"}, "line 1 has the fields of no example format"),
        ({"path": "blank.jsonl"}, "has no lines"),
        ({"path": "/etc/passwd"}, "not under the allowed folders"),
        ({"path": "gone.jsonl"}, "does not exist"),
        ({}, "a review is of a file or of a run"),
        ({"run": run.pk}, "is a train run"),
        ({"run": 999}, "There is no run 999"),
    ):
        answer = owner.post("/api/v1/reviews", body, content_type=JSON)
        assert answer.status_code in (404, 422) and message in answer.json()["detail"], body
    assert not list(source.folder().glob("*")) and not list(source.folder().glob(".*"))

    write(data_root / "a.jsonl", [line(1)])
    review = begin(owner, path="a.jsonl")
    for change, message in (
        ({"decision": "swap"}, "is not a decision"),
        ({"rating": 6}, "not from 1 to 5"),
        ({"content": {"messages": []}}, "messages is not a list"),
        ({"content": edited(1, " ")}, "is an empty answer"),
    ):
        answer = decide(owner, review, 1, 0, **change)
        assert answer.status_code == 422 and message in answer.json()["detail"]
    assert decide(owner, review, 2, 0, decision="keep").status_code == 404
    empty = owner.post(f"/api/v1/reviews/{review['id']}/data-sets", {}, content_type=JSON)
    assert empty.status_code == 409 and "No line has such a decision" in empty.json()["detail"]


def test_half_of_a_surrogate_pair_is_replaced(
    people: factories.People, home: Path, data_root: Path
) -> None:
    write(data_root / "a.jsonl", [edited(1, "a\ud800b")])
    owner = factories.api(people.owner)
    review = begin(owner, path="a.jsonl")
    assert decide(owner, review, 1, 0, decision="keep").status_code == 200
    made = owner.post(f"/api/v1/reviews/{review['id']}/data-sets", {}, content_type=JSON).json()
    assert read(made["path"])[0]["messages"][1]["content"] == "a?b"


def test_a_folder_that_cannot_be_written_is_named(
    people: factories.People, home: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(data_root / "a.jsonl", [line(1)])
    owner = factories.api(people.owner)
    review = begin(owner, path="a.jsonl")
    assert decide(owner, review, 1, 0, decision="keep").status_code == 200
    address = f"/api/v1/reviews/{review['id']}/data-sets"
    (data_root / "reviewed").write_text("a file")
    refused = owner.post(address, {}, content_type=JSON)
    assert refused.status_code == 409 and "reviewed cannot be written" in refused.json()["detail"]
    assert "ORRERY_DATA_ROOTS" in refused.json()["errors"][0]["hint"]
    (data_root / "reviewed").unlink()

    link, calls = os.link, []

    def taken(partial: Path, path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:  # another request was faster
            path.write_text("other")
        link(partial, path)

    monkeypatch.setattr(os, "link", taken)
    made = owner.post(address, {}, content_type=JSON)
    assert made.status_code == 201 and made.json()["path"].endswith("/a-2.jsonl")
    assert calls[0].read_text() == "other"

    def no_links(*paths: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    refused = owner.post(address, {}, content_type=JSON)
    assert refused.status_code == 409 and "not permitted" in refused.json()["detail"]
    assert ReviewedFile.objects.count() == 1 and len(list((data_root / "reviewed").iterdir())) == 2


def test_a_produce_run_is_reviewed_and_a_review_deleted(
    people: factories.People, home: Path, data_root: Path
) -> None:
    body = {"tasks": ["math"], "count": 5, "server": {"url": "http://x/v1", "model": "m"}}
    run = factories.run(people.owner, kind="produce", train=None, plan={}, produce=body)
    owner, mate = factories.api(people.owner), factories.api(people.teammate)
    assert owner.post("/api/v1/reviews", {"run": run.pk}, content_type=JSON).status_code == 409
    folder = home / "runs" / str(run.pk)
    folder.mkdir(parents=True)
    write(folder / "produced.jsonl", [{**line(1), "provenance": {"unit": 0}}], end='\n{"mess')
    review = begin(mate, run=run.pk)
    assert (review["run"], review["lines"]) == (run.pk, 1), "an incomplete line is left out"
    made = decide(mate, review, 1, 0, decision="keep").json()
    assert made["content"]["provenance"] == {"unit": 0}
    assert owner.delete(f"/api/v1/reviews/{review['id']}").status_code == 403
    assert mate.delete(f"/api/v1/reviews/{review['id']}").status_code == 204
    assert not Review.objects.exists() and not list(source.folder().glob("*.jsonl"))
