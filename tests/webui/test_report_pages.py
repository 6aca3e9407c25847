"""Report pages: list, report, editor, conflict, versions, share links and the shared page."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from orchestrator.accounts.models import Team
from orchestrator.accounts.roles import Role
from orchestrator.reports import comments, services, share_links
from orchestrator.reports.models import Report, ReportComment, ShareLink
from tests import factories
from tests.webui.pages import compact
from webui.reports.text import render_report

pytestmark = pytest.mark.django_db
TABLE = "```runs\nquery: kind = train\ncolumns: model\n```"


def page_of(client: Client, path: str, status: int = 200) -> str:
    answer = client.get(path)
    assert answer.status_code == status, answer.content.decode()[-2000:]
    return compact(answer.content.decode())


def made(people: factories.People, text: str = "# Result\n\nIt *scales*.") -> Report:
    return services.report_create(owner=people.owner, title="Scaling", text=text)


def test_a_report_is_written_changed_and_listed(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    assert "No reports yet" in page_of(client, "/reports/")
    typed = {"title": "Scaling", "text": "# Result\r\n\r\nIt *scales*.", "note": ""}
    answer = client.post("/reports/new/", typed, follow=True)
    page = compact(answer.content.decode())
    row = Report.objects.get()
    assert "Report created." in page and '<h2 id="section-result">Result</h2>' in page
    assert "<em>scales</em>" in page and "Version 1 by owner," in page
    edit = f"/reports/{row.pk}/edit/"
    assert 'name="version" value="1"' in page_of(client, edit)
    client.post(edit, {**typed, "version": "1", "title": "Scaling laws", "note": "plural"})
    row.refresh_from_db()
    assert (row.head, row.title) == (2, "Scaling laws")
    listed = page_of(client, "/reports/?q=laws")
    assert ">Scaling laws</a>" in listed and "1 report; no open comments." in listed
    assert "No report matches" in page_of(client, "/reports/?q=other")
    wrong = client.post(edit, {"version": "2", "title": "", "text": "```runs\nlimit: x\n```"})
    assert wrong.status_code == 422 and "title has 1 to 160" in wrong.content.decode()
    wrong = client.post(edit, {"version": "2", "title": "t", "text": "```runs\nlimit: x\n```"})
    assert wrong.status_code == 422 and "ine 1: limit" in wrong.content.decode()
    same = client.post(edit, {**typed, "version": "2", "title": "Scaling laws"}, follow=True)
    assert "Nothing was changed." in same.content.decode()


def test_two_editors_see_both_texts_and_lose_none(people: factories.People) -> None:
    row = made(people, "a\nb\nc\nd\ne")
    owner, mate = factories.client_for(people.owner), factories.client_for(people.teammate)
    edit = f"/reports/{row.pk}/edit/"
    mate.post(edit, {"version": "1", "title": "Scaling", "text": "A\nb\nc\nd\ne"})
    answer = owner.post(edit, {"version": "1", "title": "Scaling", "text": "a\nb\nc\nd\nE"})
    page = compact(answer.content.decode())
    assert answer.status_code == 409
    assert "teammate saved version 2 while you were writing" in page
    assert "the text below holds both" in page and ">A\nb" not in page
    assert re.search(r'name="text".*?>A b c d E</textarea>', page)
    assert 'name="version" value="2"' in page
    assert '<td class="text">A</td>' in page and '<td class="text">E</td>' in page
    row.refresh_from_db()
    assert row.head == 2  # nothing was saved
    answer = owner.post(edit, {"version": "1", "title": "Scaling", "text": "mine\nb\nc\nd\ne"})
    page = compact(answer.content.decode())
    assert "Both of you changed the same lines" in page
    assert re.search(r'name="text".*?>mine b c d e</textarea>', page)


def test_roles_see_what_they_may_do(people: factories.People) -> None:
    row = made(people)
    viewer = factories.user("viewer", Role.VIEWER)
    Team.objects.get(name="lab").members.add(viewer)
    for person, actions in (
        (people.owner, ("Edit", "Share", "New comment", "Delete this report")),
        (people.teammate, ("Edit", "Share", "New comment")),
        (viewer, ()),
    ):
        page = page_of(factories.client_for(person), f"/reports/{row.pk}/")
        for action in ("Edit", "Share", "New comment", "Delete this report"):
            assert (f">{action}<" in page) == (action in actions), (person, action)
    client = factories.client_for(viewer)
    for path in (f"/reports/{row.pk}/edit/", f"/reports/{row.pk}/share/", "/reports/new/"):
        assert client.get(path).status_code == 403
    assert client.post(f"/reports/{row.pk}/comments/", {"text": "x"}).status_code == 403
    assert "New report" not in page_of(client, "/reports/")
    stranger = factories.client_for(people.stranger)
    assert stranger.get(f"/reports/{row.pk}/").status_code == 404


def test_comments(people: factories.People) -> None:
    row = made(people)
    mate, owner = factories.client_for(people.teammate), factories.client_for(people.owner)
    at = f"/reports/{row.pk}/comments/"
    answer = mate.post(at, {"text": "Why **so**? <script>"})
    first = ReportComment.objects.get()
    assert answer["Location"] == f"/reports/{row.pk}/#comment-{first.pk}"
    owner.post(at, {"text": "Because.", "parent": str(first.pk)})
    page = page_of(owner, f"/reports/{row.pk}/")
    assert "<strong>so</strong>" in page and "&lt;script&gt;" in page and "Because." in page
    assert "1 open" in page and "1 open comment." in page_of(owner, "/reports/")
    owner.post(f"{at}{first.pk}/", {"action": "resolve"})
    assert "Comment by teammate, resolved by owner" in page_of(owner, f"/reports/{row.pk}/")
    owner.post(f"{at}{first.pk}/", {"action": "reopen"})
    assert mate.post(f"{at}{first.pk}/", {"action": "explode"}).status_code == 422
    mate.post(f"{at}{first.pk}/", {"action": "delete"})
    assert not ReportComment.objects.exists()


def test_versions_are_compared_and_restored(people: factories.People) -> None:
    row = made(people, "one\ntwo\nthree")
    services.report_update(
        report=row, by=people.teammate, version=1, title="New", text="one\n2\nthree", note="digit"
    )
    client = factories.client_for(people.owner)
    page = page_of(client, f"/reports/{row.pk}/versions/")
    assert "From version 1 to version 2" in page and "Lines: 1 added, 1 removed" in page
    assert '<td class="text">two</td>' in page and '<td class="text">2</td>' in page
    assert "<del>Scaling</del><ins>New</ins>" in page and "digit" in page
    assert "From version 2 to version 1" in page_of(
        client, f"/reports/{row.pk}/versions/?from=2&to=1"
    )
    assert client.get(f"/reports/{row.pk}/versions/?to=9").status_code == 404
    old = page_of(client, f"/reports/{row.pk}/versions/1/")
    assert "This is version 1; the newest one is 2." in old
    stale = client.post(f"/reports/{row.pk}/versions/1/restore/", {"version": "1"})
    assert stale.status_code == 409
    answer = client.post(f"/reports/{row.pk}/versions/1/restore/", {"version": "2"}, follow=True)
    assert "Version 1 is restored as version 3." in answer.content.decode()
    row.refresh_from_db()
    assert (row.head, row.title) == (3, "Scaling")


def shared_path(link: ShareLink) -> str:
    return f"/shared/reports/{share_links.link_token(link)}/"


def test_a_shared_page_shows_the_report_alone(people: factories.People) -> None:
    run = factories.run(people.owner, name="best run")
    text = (
        f"See run:{run.pk}, [the runs](/runs/), [docs](https://example.org/a) and "
        f"[above](#section-x).\n\n{TABLE}"
    )
    row = made(people, text)
    comments.comment_create(report=row, by=people.owner, text="secret remark")
    client = factories.client_for(people.owner)
    answer = client.post(
        f"/reports/{row.pk}/share/", {"days": "7", "note": "reviewers"}, follow=True
    )
    link = ShareLink.objects.get()
    page = compact(answer.content.decode())
    assert f"http://testserver{shared_path(link)}" in page and "reviewers" in page
    seen = factories.client_for(people.teammate).get(f"/reports/{row.pk}/share/").content.decode()
    assert shared_path(link) not in seen and "Only its author sees the address" in seen
    anonymous = Client().get(shared_path(link))
    page = compact(anonymous.content.decode())
    assert page.count("best run") == 2 and "llama-tiny" in page
    assert set(re.findall(r'<a [^>]*href="([^"]*)"', page)) == {
        "https://example.org/a",
        "#section-x",
    }
    for private in ("secret remark", "owner", "teammate", "/runs/", "csrf", "hx-", "/account"):
        assert private not in page, private
    assert anonymous["Cache-Control"] == "no-store"
    assert anonymous["Referrer-Policy"] == "no-referrer"
    assert "noindex" in anonymous["X-Robots-Tag"]
    assert "script-src 'self'" in anonymous["Content-Security-Policy"]
    logged_in = compact(client.get(shared_path(link)).content.decode())
    assert "/runs/" not in logged_in
    assert "never" not in page_of(client, f"/reports/{row.pk}/share/")


def test_ended_links_say_so(people: factories.People) -> None:
    row = made(people)
    link = share_links.link_create(report=row, by=people.owner)
    client, path = Client(), shared_path(link)
    ShareLink.objects.update(expires=timezone.now() - timedelta(days=1))
    page = page_of(client, path, 410)
    assert "This link has expired" in page and "It was valid until" in page
    assert "Scaling" not in page and "scales" not in page
    ShareLink.objects.update(expires=timezone.now() + timedelta(days=1))
    owner = factories.client_for(people.owner)
    owner.post(f"/reports/{row.pk}/share/{link.pk}/revoke/")
    page = page_of(client, path, 410)
    assert "This link was revoked" in page and "scales" not in page
    ShareLink.objects.update(revoked=None)
    type(people.owner).objects.filter(pk=people.owner.pk).update(is_active=False)
    assert "This link no longer works" in page_of(client, path, 410)
    forged = path[:-3] + ("AA/" if path[-3:] != "AA/" else "BB/")
    assert "This link is not valid" in page_of(client, forged, 404)


def test_a_link_shows_only_runs_that_its_author_and_editor_see(people: factories.People) -> None:
    """Live and frozen; an editor cannot read foreign runs through the link of another person."""
    other = factories.user("other")
    rivals = Team.objects.create(name="rivals")
    rivals.members.add(people.owner, other)
    foreign = factories.run(other, name="rival run")
    own = factories.run(people.teammate, name="lab run")
    frozen = TABLE.replace("```runs", "```runs frozen 1", 1)
    row = made(people, f"{frozen}\n\n{TABLE}\n\nrun:{foreign.pk}")
    link = share_links.link_create(report=row, by=people.owner)
    page = page_of(Client(), shared_path(link))
    assert page.count("rival run") == 3 and page.count("lab run") == 2
    # a teammate who is not in the other team saves a version: their rights apply too
    mate = factories.client_for(people.teammate)
    text = f"{frozen}\n\n{TABLE}\n\nAlso run:{foreign.pk}"
    mate.post(f"/reports/{row.pk}/edit/", {"version": "1", "title": "t", "text": text})
    page = page_of(Client(), shared_path(link))
    assert "rival run" not in page and page.count("lab run") == 2
    assert "1 run is hidden" in page
    mine = page_of(mate, f"/reports/{row.pk}/")
    assert "rival run" not in mine and "1 run is hidden" in mine
    # the author leaves the team: the link shows its runs no longer
    services.report_restore(report=row, by=people.owner, number=1, version=2)
    assert page_of(Client(), shared_path(link)).count("rival run") == 3
    rivals.members.remove(people.owner)
    assert "rival run" not in page_of(Client(), shared_path(link))
    assert own.name in page_of(Client(), shared_path(link))


def test_the_preview_is_drawn_with_the_writers_rights(people: factories.People) -> None:
    client = factories.client_for(people.owner)
    factories.run(people.owner, name="mine")
    text = f"{TABLE}\n\n```runs frozen\nquery: lr >\n```\n\n<b>x</b>"
    page = compact(client.post("/reports/preview/", {"text": text}).content.decode())
    assert "mine" in page and "This run table cannot be shown" in page
    assert "Line 6 of the text." in page and "<b>" not in page and "<html" not in page
    assert client.post("/reports/preview/", {"text": "x", "report": "99"}).status_code == 404
    assert "The preview appears here" in page_of(client, "/reports/new/")
    wanted = page_of(client, "/reports/new/?runs=1,x,2")
    assert "runs: 1, 2" in wanted


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "![x](https://e.org/p.png)"])
def test_text_cannot_hurt(text: str) -> None:
    rendered = render_report(text, runs=lambda ids: {})
    html = "".join(part.html for part in rendered.parts)
    assert "<script" not in html and "<img" not in html


def test_headings_have_no_gaps() -> None:
    rendered = render_report("## a\n\n#### b\n\n## a\n\n# c", runs=lambda ids: {})
    shown = [(one.level, one.id) for one in rendered.headings]
    assert shown == [(2, "section-a"), (3, "section-b"), (3, "section-a-2"), (2, "section-c")]
    rendered = render_report("### a\n\n#### b", runs=lambda ids: {})
    assert [one.level for one in rendered.headings] == [2, 3]


def test_mentions_of_runs_are_links(people: factories.People) -> None:
    run = factories.run(people.owner, name="<b>")
    missing = 10**9
    text = f"run:{run.pk} run:{missing} `run:{run.pk}` [x run:{run.pk}](https://e.org)"

    def html(**more: Any) -> str:
        rendered = render_report(text, runs=lambda ids: {run.pk: run}, **more)
        return "".join(part.html for part in rendered.parts)

    assert html().count(f'href="/runs/{run.pk}/"') == 1
    assert "&lt;b&gt;" in html() and f"run:{missing}" in html()
    assert len(re.findall(rf"run:{run.pk}\b", html())) == 2
    assert "/runs/" not in html(public=True) and "&lt;b&gt;" in html(public=True)
