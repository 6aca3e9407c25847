"""Dashboards in Chromium by keyboard alone: a panel is added, moved, refused and removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.polling import wait_until
from tests.browser.site import Site

pytestmark = pytest.mark.browser

ORDER = "() => [...document.querySelectorAll('[data-slot]')].map((slot) => slot.dataset.slot)"


def test_a_dashboard_is_edited_by_keyboard(visit: Callable[..., Page], site: Site) -> None:
    run = site.external("with a dashboard")
    site.log(run, 1, 20, loss=2.0, val_loss=2.5)
    document = {
        "panels": [
            {"id": "a", "kind": "line", "metrics": ["loss"]},
            {"id": "b", "kind": "line", "metrics": ["gone"]},
            {"id": "c", "kind": "markdown", "title": "Notes", "text": "text"},
        ]
    }
    made = site.client.post("dashboards", json={"name": "d", "run": int(run), "document": document})
    assert made.status_code == 201, made.text
    id = made.json()["id"]
    page = visit(f"/dashboards/{id}/?edit=1", viewport={"width": 390, "height": 900})
    wait_until(page, "() => window.orreryDashboard !== undefined")
    wait_until(page, "() => document.querySelector('#panel-a .js-plotly-plot') !== null")
    expect(page.locator("#panel-b .chart-note")).to_contain_text("No run has gone")

    page.get_by_role("button", name="Move loss down").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#announce")).to_have_text("loss moved to place 2 of 3.")
    expect(page.get_by_role("button", name="Move loss down")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#announce")).to_have_text("loss moved to place 3 of 3.")
    assert page.evaluate(ORDER) == ["b", "c", "a"]
    expect(page.locator("#saved")).to_have_text("All changes are saved")

    page.get_by_role("button", name="Add panel").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("loss(")
    error = page.locator('[data-error-of="pattern"]')
    expect(error).to_contain_text("at character 5: this parenthesis is not closed")
    page.keyboard.press("Backspace")
    expect(page.locator("#panel-search-count")).to_have_text("2 matches")
    page.get_by_label("each metric that matches the search").focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Save panel").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#panel-dialog")).to_be_hidden()
    expect(page.locator("[data-slot]")).to_have_count(4)

    page.locator('[data-slot="b"] [data-do="remove"]').focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-slot]")).to_have_count(3)
    page.get_by_role("button", name="Undo").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-slot]")).to_have_count(4)
    expect(page.locator("#saved")).to_have_text("All changes are saved")
    stored = site.client.get(f"dashboards/{id}").json()["document"]["panels"]
    assert [panel["id"] for panel in stored] == ["b", "c", "a", "p4"]
    assert stored[-1] == {"id": "p4", "kind": "line", "pattern": "loss"}
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_chart_of_a_run_and_of_compare_is_added_and_pinned(
    visit: Callable[..., Page], site: Site
) -> None:
    run, other = site.external("first"), site.external("second")
    for each in (run, other):
        site.log(each, 1, 20)
    site.refresh_summaries()
    page = visit(f"/runs/{run}/")
    chart = page.locator('[data-panel="loss"]')
    expect(chart.locator(".js-line").first).to_be_visible()
    chart.locator("summary").click()
    chart.get_by_role("button", name="Add to dashboard").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("[name=target]").select_option(label="for this run")
    dialog.get_by_label("Title").fill("Pinned loss")
    dialog.get_by_label("Pin:").check()
    dialog.get_by_role("button", name="Add", exact=True).click()
    toast = page.locator("#toasts")
    expect(toast).to_contain_text("The chart is on the dashboard Charts of first.")
    page.reload()
    pinned = page.locator("section:has(#pinned-title) figure")
    expect(pinned.locator("h2")).to_have_text("Pinned loss")
    expect(pinned.locator(".js-line").first).to_be_visible()

    page.goto(f"/runs/compare/?runs={run},{other}&x=tokens")
    card = page.locator("#curves")
    expect(card).to_have_attribute("data-drawn", "2")
    card.locator("summary").click()
    with page.expect_download() as download:
        card.get_by_role("button", name="Download PNG").click()
    assert download.value.suggested_filename == "compare.png"
    card.locator("summary").click()
    card.get_by_role("button", name="Add to dashboard").click()
    dialog.locator("[name=target]").select_option(label="for yourself")
    dialog.get_by_label("Name of the new dashboard").fill("")
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("1 to 120 characters")
    dialog.get_by_label("Name of the new dashboard").fill("Compared")
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(toast).to_contain_text("The chart is on the dashboard Compared.")
    stored = site.client.get("dashboards", params={"q": "Compared"}).json()["items"][0]
    panel = stored["document"]["panels"][0]
    assert (panel["x"], panel["runs"]["runs"]) == ("tokens", [run, other])
