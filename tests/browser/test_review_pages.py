"""Reviews by keyboard and mouse, and a side-by-side chat, in a real Chromium."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from orchestrator.reviews import comparisons, selectors, services
from orchestrator.reviews.models import ComparisonTurn, Review
from orchestrator.runs import services as runs
from tests import factories
from tests.browser.logged_in_page import opened
from tests.orchestrator.api.fake_server import Thread
from tests.orchestrator.reviews.test_comparisons import Server
from workers.contracts.wire.serving_reports import SERVING

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> None:
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path / "home"})


def shots(page: Page, name: str) -> None:
    """Pictures for people, at desktop and phone width, light and dark."""
    if not os.environ.get("SHOTS"):
        return
    Path("/tmp/shots").mkdir(exist_ok=True)
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.wait_for_timeout(300)
            page.screenshot(path=f"/tmp/shots/{name}-{width}-{scheme}.png", full_page=True)
    page.set_viewport_size({"width": 1440, "height": 900})


def fits(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1440, "height": 900})


def test_lines_are_decided_by_keys_and_edited(
    browser: Browser, live_server: Any, people: factories.People, data_root: Path
) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}+{n}?"},
                {"role": "assistant", "content": f"It is {2 * n}."},
            ],
            "task_type": "math",
            "provenance": {"unit": n, "scores": {"judge": 7}},
        }
        for n in range(1, 6)
    ]
    (data_root / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = services.review_create(by=people.owner, path="sums.jsonl")
    with opened(browser, live_server, f"/data/reviews/{row.pk}/") as page:
        title = page.locator("#line-title")
        expect(title).to_have_text("Line 1 of 5")
        expect(page.locator("#review-line")).to_contain_text("What is 1+1?")
        page.keyboard.press("4")
        expect(page.locator('[data-rating="4"]')).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("k")
        expect(title).to_have_text("Line 2 of 5")
        expect(page.locator("#data-sentence")).to_contain_text("1 of 5 lines decided: 1 kept.")
        # a teammate decides about the line that is open: nothing is overwritten
        services.line_change(
            review=row, line=2, version=0, by=people.teammate, edit=services.LineEdit("drop")
        )
        page.locator('[data-decision="keep"]').click()
        expect(page.locator(".toast")).to_contain_text("changed by teammate")
        expect(page.locator("#review-state")).to_contain_text("dropped · by teammate")
        page.locator(".toast button").click()
        page.keyboard.press("l")
        expect(title).to_have_text("Line 3 of 5")
        page.keyboard.press("e")
        area = page.locator("#review-line textarea").last
        area.fill("It is six.")
        # a teammate changes it meanwhile: the text that is typed stays
        services.line_change(
            review=row, line=3, version=0, by=people.teammate, edit=services.LineEdit("keep")
        )
        area.press("Control+Enter")
        expect(page.locator(".toast")).to_contain_text("changed by teammate")
        expect(page.locator("#review-state")).to_contain_text("kept · by teammate")
        expect(area).to_have_value("It is six.")
        page.locator(".toast button").click()
        area.press("Control+Enter")
        expect(page.locator(".review-text.edited")).to_contain_text("It is six.")
        page.locator("#review-note").fill("in words")
        page.keyboard.press("Escape")
        page.keyboard.press("d")
        expect(title).to_have_text("Line 4 of 5")
        page.locator("[name=show]").select_option("drop")
        expect(title).to_have_text("Line 2 of 5")
        fits(page)
        shots(page, "review")
    third = selectors.line_get(review=row, line=3)
    assert (third.decision, third.note, third.by) == ("drop", "in words", "owner")
    assert third.content["messages"][1]["content"] == "It is six."
    assert selectors.line_get(review=row, line=1).rating == 4
    with opened(browser, live_server, "/data/reviews/") as page:
        fits(page)
        shots(page, "reviews")


def test_pairs_are_chosen_blind(
    browser: Browser, live_server: Any, people: factories.People, data_root: Path
) -> None:
    lines = [{"prompt": f"{n}?", "chosen": "good", "rejected": "bad"} for n in range(6)]
    (data_root / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = services.review_create(by=people.owner, path="pairs.jsonl")
    with opened(browser, live_server, f"/data/reviews/{row.pk}/") as page:
        first = set()
        for number in range(1, 7):
            expect(page.locator("#line-title")).to_have_text(f"Line {number} of 6")
            left = page.locator(".review-pair .review-text p").first
            expect(left).to_be_visible()
            first.add(left.inner_text())
            assert "chosen" not in page.locator("#review-line").inner_text()
            if number == 6:
                shots(page, "review-pairs")
            page.keyboard.press("a" if left.inner_text() == "good" else "b")
        expect(page.locator("#data-sentence")).to_contain_text("6 of 6 lines decided: 6 kept.")
    assert first == {"good", "bad"}, "the order differs from line to line"
    assert selectors.counts(review=Review.objects.get())["keep"] == 6


def test_two_models_are_compared_blind(
    browser: Browser, live_server: Any, people: factories.People
) -> None:
    node, ids = factories.node("n1"), []
    servers = [Server("alpha"), Server("beta")]
    with Thread(servers[0].app) as one, Thread(servers[1].app) as two:
        for server, thread in zip(servers, (one, two), strict=True):
            run = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
            factories.running(run, node)
            data = {"host": "", "port": thread.port, "model": server.name, "context": 99}
            runs.event_record(run=run, type=SERVING, data={**data, "chat": True}, attempt=1)
            ids.append(run.pk)
        with opened(browser, live_server, "/data/comparisons/") as page:
            fits(page)
            shots(page, "comparisons")
            page.get_by_role("button", name="Start").click()
            page.locator("#side-text").fill("Hello both")
            page.keyboard.press("Enter")
            votes = page.locator("#side-votes")
            expect(votes).to_be_visible()
            expect(page.locator("#side-log .badge").first).to_have_text("A")
            page.locator("h1").click()
            page.keyboard.press("a")
            expect(votes).to_be_hidden()
            better = page.locator("#side-log .better .badge").first
            expect(better).to_contain_text(re.compile(r"A: (alpha|beta) \(run \d+\)"))
            # without a reload
            expect(page.locator("#side-results .turn")).to_have_count(1)
            expect(page.get_by_role("button", name="Write votes")).to_be_enabled()
            page.locator("#side-text").fill("More, please")
            page.locator("#side-send").click()
            expect(votes).to_be_visible()
            page.get_by_role("button", name="Tie").click()
            expect(votes).to_be_hidden()
            page.reload()
            expect(page.locator(".rate")).to_have_count(1)
            fits(page)
            shots(page, "comparison")
    turns = list(ComparisonTurn.objects.order_by("pk"))
    assert [turn.choice for turn in turns] == ["a", "tie"]
    assert len(turns[1].messages) == 3 and comparisons.serialize_turn(turns[1])["models"]
