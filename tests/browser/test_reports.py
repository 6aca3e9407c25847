"""Reports in Chromium: the editor with its buttons, and a shared page that fetches no data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.site import Site

pytestmark = pytest.mark.browser

Visit = Callable[..., Page]


def test_a_report_is_written_by_buttons_frozen_and_saved(visit: Visit, site: Site) -> None:
    run = site.external("curve of a report")
    for step in range(1, 4):
        site.log(run, step, 1, loss=5.0 - step)
    page = visit("/reports/new/")
    page.get_by_label("Title", exact=True).first.fill("What the curve shows")
    source, preview = page.locator("#source"), page.locator("#preview")
    source.press_sequentially("See ")
    page.get_by_role("button", name="Run link").click()
    page.locator("#run-search").fill("curve of a report")
    page.locator("#run-choices button").first.click()
    expect(preview.locator("a.run-link")).to_contain_text("curve of a report")
    page.get_by_role("button", name="Panel", exact=True).click()
    page.locator("#insert-panel [name=metrics]").fill("loss")
    page.locator("#insert-panel [name=runs]").fill(run)
    page.get_by_role("button", name="Insert").first.click()
    expect(preview.locator(".js-plotly-plot")).to_be_visible()
    page.evaluate("window.panel = document.querySelector('#preview [data-panel-spec]')")
    source.press("Control+Home")
    source.press_sequentially("Now: ")
    expect(preview).to_contain_text("Now: See")
    assert page.evaluate("window.panel.isConnected")  # it does not flash while typing
    # the cursor is moved into the block, whose data are then frozen
    page.evaluate("""() => {
      const source = document.getElementById("source"), at = source.value.indexOf("kind:");
      source.setSelectionRange(at, at);
      source.dispatchEvent(new Event("click"));
    }""")
    page.get_by_role("button", name="Freeze").click()
    assert "```panel frozen 2" in source.input_value()
    expect(preview).to_contain_text("Will be frozen when you save")
    source.press("Control+s")
    expect(page.get_by_text("Report created.")).to_be_visible()
    expect(page.get_by_text("Data of 2")).to_be_visible()


def test_a_shared_page_needs_no_login_and_prints_vectors(browser: Browser, site: Site) -> None:
    run = site.external("shared curve")
    for step in range(1, 4):
        site.log(run, step, 1, loss=5.0 - step)
    text = f"```panel\nkind: line\nmetrics: [loss]\nruns: {{runs: [{run}]}}\n```"
    report = site.client.post("reports", json={"title": "Shared", "text": text}).json()
    link = site.client.post(f"reports/{report['id']}/links", json={}).json()
    context = browser.new_context(base_url=site.url)
    page, requested = context.new_page(), list[str]()
    page.on("request", lambda request: requested.append(request.url.removeprefix(site.url)))
    page.add_init_script("window.print = () => { window.printed = true; }")
    page.goto(link["path"])
    expect(page.locator(".js-plotly-plot .scatterlayer").first).to_be_visible()
    page.get_by_role("button", name="Print or save as PDF").click()
    page.wait_for_function("window.printed")
    source = page.locator(".print-picture").first.get_attribute("src") or ""
    assert source.startswith("data:image/svg+xml")
    assert not [url for url in requested if not url.startswith(("/static/", "/shared/", "data:"))]
    site.client.delete(f"reports/{report['id']}/links/{link['id']}")
    page.goto(link["path"])
    expect(page.get_by_role("heading", name="This link was revoked")).to_be_visible()
    context.close()
