"""Reports: versions, conflicts, comments, share links, and who may do what."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from orchestrator.accounts.models import AuditEntry, Team, TeamMembership, User
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.reports import comments, selectors, services, share_links
from orchestrator.reports.models import FrozenPanel, Report, ReportVersion
from tests import factories

pytestmark = pytest.mark.django_db
BASE = "# Question\n\nDoes it scale?\n\nMaybe.\n\nMore soon."


def report(owner: User, text: str = BASE) -> Report:
    return services.report_create(owner=owner, title="Scaling", text=text)


def test_each_change_is_a_version_and_none_is_altered(people: factories.People) -> None:
    row = report(people.owner)
    services.report_update(report=row, by=people.owner, version=1, text="two", note="shorter")
    services.report_update(report=row, by=people.teammate, version=2, title="Scaling laws")
    services.report_update(report=row, by=people.teammate, version=3, text="two")  # no change
    versions = list(selectors.versions_of(report=row).order_by("number"))
    assert [(one.number, one.title, one.text) for one in versions] == [
        (1, "Scaling", BASE),
        (2, "Scaling", "two"),
        (3, "Scaling laws", "two"),
    ]
    services.report_restore(report=row, by=people.owner, number=1, version=3)
    newest = selectors.version_get(report=row)
    assert (newest.number, newest.restored, newest.text) == (4, 1, BASE)
    assert row.title == "Scaling" and row.head == 4
    actions = AuditEntry.objects.filter(target=f"report:{row.pk}").order_by("pk")
    assert list(actions.values_list("action", flat=True)) == [
        "report.create",
        "report.update",
        "report.update",
        "report.restore",
    ]


def test_a_change_of_an_old_version_shows_both_and_overwrites_nothing(
    people: factories.People,
) -> None:
    row = report(people.owner)
    services.report_update(
        report=row, by=people.owner, version=1, text=BASE.replace("Maybe.", "Yes.")
    )
    client = factories.api(people.teammate)
    typed = {"version": 1, "text": BASE.replace("More soon.", "The end.")}
    answer = client.patch(f"/api/v1/reports/{row.pk}", typed, content_type="application/json")
    problem = answer.json()
    assert answer.status_code == 409
    assert problem["type"].endswith("/version-conflict")
    assert "owner saved version 2 after version 1" in problem["detail"]
    assert problem["current"]["version"] == 2 and "Yes." in problem["current"]["text"]
    assert problem["submitted"]["text"].endswith("The end.")
    assert "-Yes.\n+Maybe." in problem["diff"]
    assert problem["merged"] == BASE.replace("Maybe.", "Yes.").replace("More soon.", "The end.")
    assert ReportVersion.objects.filter(report=row).count() == 2
    merged = {"version": 2, "text": problem["merged"]}
    answer = client.patch(f"/api/v1/reports/{row.pk}", merged, content_type="application/json")
    assert answer.status_code == 200 and answer.json()["version"] == 3


def test_a_race_of_two_editors_is_a_conflict(people: factories.People) -> None:
    row, stale = report(people.owner), Report.objects.get()
    services.report_update(report=row, by=people.owner, version=1, text="first")
    with pytest.raises(services.VersionConflict) as caught:  # read before the first saved
        services.report_update(report=stale, by=people.teammate, version=1, text="second")
    assert caught.value.merged is None and caught.value.current.text == "first"


def test_roles(people: factories.People) -> None:
    row = report(people.owner)
    reader = factories.user("reader", Role.VIEWER)
    Team.objects.get(name="lab").members.add(reader)
    assert selectors.report_get(user=reader, id=row.pk) == row
    for allowed in (people.owner, people.teammate, people.operator, people.admin):
        assert selectors.may_edit(row, allowed)
    # of the site a submitter, but only a viewer in the team
    TeamMembership.objects.filter(user=people.teammate).update(role=Role.VIEWER)
    for refused in (reader, people.teammate, people.stranger):
        with pytest.raises(Refusal) as caught:
            services.report_update(report=row, by=refused, version=1, text="x")
        assert caught.value.status == 403
        with pytest.raises(Refusal):
            comments.comment_create(report=row, by=refused, text="x")
        with pytest.raises(Refusal):
            share_links.link_create(report=row, by=refused)
    with pytest.raises(Refusal) as caught:
        selectors.report_get(user=people.stranger, id=row.pk)
    assert caught.value.status == 404
    with pytest.raises(Refusal):
        services.report_create(owner=reader, title="x")
    with pytest.raises(Refusal):
        services.report_delete(report=row, by=reader)
    services.report_delete(report=row, by=people.owner)
    assert not Report.objects.exists()


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"title": "  "}, "title", "1 to 160"),
        ({"title": "x" * 161}, "title", "1 to 160"),
        ({"text": "x" * 200_001}, "text", "200,001 characters"),
        ({"note": "x" * 201}, "note", "200"),
        ({"text": "a\n\n```runs\nlimit: 0\n```"}, "text", "line 3: limit 0 is not"),
        ({"text": "```runs\ncolums: a\n```"}, "text", "no field 'colums'"),
        ({"text": "```runs\nruns: first\n```"}, "text", "'first' is not a run's number"),
        ({"text": "```runs\n- a\n```"}, "text", "not a list of fields"),
        ({"text": "```runs\na: &x [1]\nb: *x\n```"}, "text", "aliases are not possible"),
        ({"text": "```runs\nquery: [\n```"}, "text", "line 1: "),
        ({"text": "```runs\n```\n" * 61}, "text", "more than 60 panels and run tables"),
        ({"text": "```runs frozen\nquery: nope > 3\n```"}, "text", "line 1: "),
    ],
)
def test_bad_input(owner: User, changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        services.report_create(owner=owner, **{"title": "t", **changes})
    assert caught.value.errors[0]["field"] == field
    assert message in caught.value.errors[0]["message"]
    assert not Report.objects.exists()


def test_frozen_data_never_change(people: factories.People) -> None:
    first = factories.run(people.owner, name="first")
    text = (
        "```runs frozen 2026-01-15\nquery: kind = train\n```\n\n```runs\nquery: kind = train\n```"
    )
    row = report(people.owner, text)
    factories.run(people.owner, name="second")
    services.report_update(report=row, by=people.teammate, version=1, text=f"Intro.\n\n{text}")
    frozen = FrozenPanel.objects.get()
    assert [one["name"] for one in frozen.data["rows"]] == ["first"]
    assert frozen.runs == [first.pk] and frozen.by == people.owner
    later = text.replace("2026-01-15", "2026-02-01")
    services.report_update(report=row, by=people.owner, version=2, text=later)
    assert FrozenPanel.objects.count() == 2
    assert len(FrozenPanel.objects.latest("pk").data["rows"]) == 2


def test_comments_have_answers_and_are_resolved(people: factories.People) -> None:
    row = report(people.owner)
    first = comments.comment_create(report=row, by=people.teammate, text="Why?")
    answer = comments.comment_create(report=row, by=people.owner, text="So.", parent=first)
    with pytest.raises(Refusal, match="an answer has no answers"):
        comments.comment_create(report=row, by=people.owner, text="x", parent=answer)
    comments.comment_resolve(comment=first, by=people.owner, resolved=True)
    listed = selectors.reports_visible_to(user=people.owner).get()
    assert listed.open_comments == 0
    comments.comment_create(report=row, by=people.teammate, text="And?", parent=first)
    first.refresh_from_db()
    assert first.resolved is None  # an answer reopens it
    (thread,) = selectors.threads_of(report=row)
    assert [one.text for one in thread.answers] == ["So.", "And?"]
    assert selectors.reports_visible_to(user=people.owner).get().open_comments == 1
    with pytest.raises(Refusal, match="resolved with its comment"):
        comments.comment_resolve(comment=answer, by=people.owner, resolved=True)
    with pytest.raises(Refusal):
        comments.comment_delete(comment=answer, by=people.teammate)
    comments.comment_delete(comment=first, by=people.teammate)
    assert not selectors.threads_of(report=row)


def test_links_are_signed_and_end(people: factories.People, settings: Any) -> None:
    row = report(people.owner)
    link = share_links.link_create(report=row, by=people.owner, note="for the review")
    token = share_links.link_token(link)
    assert share_links.link_by_token(token) == link
    assert selectors.link_state(link) == "active"
    id, nonce, signature = token.split(".")
    other = share_links.link_create(report=row, by=people.owner)
    for guess in (
        "",
        "x",
        f"{id}.{nonce}",
        f"{id}.{nonce}.{'A' * len(signature)}",
        f"{other.pk}.{nonce}.{signature}",
        f"{id}.{other.nonce}.{signature}",
    ):
        assert share_links.link_by_token(guess) is None
    # the address is of the server's key; an old one remains valid while it is a fallback
    old, settings.SECRET_KEY = settings.SECRET_KEY, "another key of enough characters, for a test"
    assert share_links.link_by_token(token) is None
    settings.SECRET_KEY_FALLBACKS = [old]
    assert share_links.link_by_token(token) == link
    share_links.link_revoke(link=link, by=people.teammate)
    assert selectors.link_state(link) == "revoked"
    type(other).objects.filter(pk=other.pk).update(expires=timezone.now())
    other.refresh_from_db()
    assert selectors.link_state(other) == "expired"
    for days in (-1, 366):
        with pytest.raises(Refusal, match="a year away"):
            expires = timezone.now() + timedelta(days=days)
            share_links.link_create(report=row, by=people.owner, expires=expires)
    ahead = timezone.now() + timedelta(days=365, minutes=5)  # by a client's clock
    assert share_links.link_create(report=row, by=people.owner, expires=ahead).expires == ahead


def test_a_link_ends_with_its_authors_access(people: factories.People) -> None:
    row = report(people.owner)
    link = share_links.link_create(report=row, by=people.teammate)
    assert selectors.link_state(link) == "active"
    Team.objects.get(name="lab").members.remove(people.teammate)
    assert selectors.link_state(link) == "disabled"
    Team.objects.get(name="lab").members.add(people.teammate)
    link.author.is_active = False
    assert selectors.link_state(link) == "disabled"


def test_rest(people: factories.People) -> None:
    client, mate = factories.api(people.owner), factories.api(people.teammate)

    def send(method: str, path: str, body: Any = None, by: Any = client) -> Any:
        call = getattr(by, method)
        return call(f"/api/v1/reports{path}", body, content_type="application/json")

    made = send("post", "", {"title": "Scaling", "text": "one"})
    assert made.status_code == 201 and made["Location"] == f"/api/v1/reports/{made.json()['id']}"
    at = f"/{made.json()['id']}"
    assert send("patch", at, {"version": 1, "text": "two"}, mate).json()["author"] == "teammate"
    listed = client.get(f"/api/v1/reports{at}/versions").json()["items"]
    assert [(one["version"], one["author"]) for one in listed] == [(2, "teammate"), (1, "owner")]
    assert client.get(f"/api/v1/reports{at}/versions/1").json()["text"] == "one"
    diff = client.get(f"/api/v1/reports{at}/diff").json()
    assert (diff["added"], diff["removed"]) == (1, 1) and "-one\n+two" in diff["diff"]
    assert send("post", f"{at}/versions/1/restore", {"version": 1}).status_code == 409
    assert send("post", f"{at}/versions/1/restore", {"version": 2}).json()["text"] == "one"
    comment = send("post", f"{at}/comments", {"text": "Why?"}, mate).json()
    answer = send("post", f"{at}/comments", {"text": "So.", "parent": int(comment["id"])})
    assert answer.status_code == 201 and answer.json()["parent"] == comment["id"]
    changed = send("patch", f"{at}/comments/{comment['id']}", {"resolved": True}).json()
    assert changed["resolved_by"] == "owner"
    link = send("post", f"{at}/links", {"note": "review"}).json()
    assert link["state"] == "active" and link["path"].startswith("/shared/reports/")
    seen = mate.get(f"/api/v1/reports{at}/links").json()["items"]
    assert seen[0]["path"] is None  # it has the rights of its author
    assert send("delete", f"{at}/links/{link['id']}", by=mate).status_code == 204
    assert client.get(f"/api/v1/reports{at}/links").json()["items"][0]["state"] == "revoked"
    assert client.get("/api/v1/reports?q=scal").json()["items"][0]["title"] == "Scaling"
    assert not client.get("/api/v1/reports?q=other").json()["items"]
    assert send("delete", at, by=mate).status_code == 403
    assert send("delete", at).status_code == 204
