"""Runs list and queue in Chromium over live sockets, without reloads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, WebSocketRoute, expect

from tests import factories
from tests.browser.polling import wait_until
from tests.browser.site import Site

pytestmark = pytest.mark.browser

Visit = Callable[..., Page]


def submit(site: Site, **more: Any) -> int:
    answer = site.client.post(
        "runs", json={"name": more.pop("name", "waits"), "spec": factories.spec(**more)}
    )
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def spark_of(page: Page, run: str) -> list[str]:
    values = page.locator(f'tr[data-run="{run}"] canvas.spark').get_attribute("data-values") or ""
    return values.split(",") if values else []


def test_rows_follow_their_runs_without_a_reload(visit: Visit, site: Site) -> None:
    run = site.external("watched in a list")
    page = visit("/runs/")
    page.evaluate("window.stayed = true")
    row = page.locator(f'tr[data-run="{run}"]')
    loss = row.locator('[data-cell="loss"]')
    expect(loss).to_have_text("–")
    for step in range(1, 4):
        site.log(run, step, 1, loss=5.0 - step)
        expect(loss).to_have_text(re.compile(rf"^{5 - step}(\.0+)?$"))
    assert [float(value) for value in spark_of(page, run)] == [4, 3, 2]
    site.client.post(f"runs/{run}/finish", json={"status": "finished"})
    expect(row.locator(".state")).to_have_text("finished")
    expect(page.locator("#announce")).to_have_text(f"Run {run} is finished")
    assert page.evaluate("window.stayed")


def test_cells_of_metrics_follow_their_runs(visit: Visit, site: Site) -> None:
    run = site.external("with an MFU")
    site.log(run, 1, 5, loss=2.0, mfu=0.25)
    site.refresh_summaries()
    page = visit("/runs/?columns=state,efficiency,max(loss)")
    page.evaluate("window.stayed = true")
    row = page.locator(f'tr[data-run="{run}"]')
    expect(row.locator('td[data-label="MFU"]')).to_have_text("25%")
    site.log(run, 6, 15, loss=3.0, mfu=0.5)
    site.refresh_summaries()
    site.log(run, 21, 1, loss=3.0, mfu=0.5)  # a frame after the refresh
    expect(row.locator('td[data-label="MFU"]')).to_have_text("50%")
    expect(row.locator('td[data-label="max(loss)"]')).to_have_text("3")
    assert page.evaluate("window.stayed")


def test_a_new_run_is_announced_and_shown_on_demand(visit: Visit, site: Site) -> None:
    site.external()
    page = visit("/runs/")
    expect(page.locator("tr[data-run]").first).to_be_visible()
    run = submit(site, name="just came in")
    page.get_by_text("1 new run. Reload to show it.").click()
    expect(page.locator("tr[data-run]").first).to_contain_text(f"{run} just came in")


def test_rows_missed_during_a_break_are_right_afterwards(visit: Visit, site: Site) -> None:
    run = site.external("broken line")
    page = visit("/runs/")
    loss = page.locator(f'tr[data-run="{run}"] [data-cell="loss"]')
    site.log(run, 1, 1, loss=4.0)
    expect(loss).to_have_text(re.compile("^4"))
    site.kill()
    site.start()
    site.log(run, 2, 1, loss=3.0)
    expect(loss).to_have_text(re.compile("^3"))
    site.log(run, 3, 1, loss=2.0)
    expect(loss).to_have_text(re.compile("^2"))
    expect(page.locator("#connection")).to_be_hidden()


def test_values_sent_while_a_page_is_disconnected_are_fetched(browser: Browser, site: Site) -> None:
    """Progress has no number, so the server does not repeat it: the page refetches its rows."""
    run, sockets, refused = site.external("disconnected"), [], []

    def connect(socket: WebSocketRoute) -> None:
        if refused:
            socket.close()
        else:
            socket.connect_to_server()
            sockets.append(socket)

    with browser.new_context(base_url=site.url) as context:
        context.add_cookies([site.session()])
        page = context.new_page()
        page.route_web_socket(re.compile("/ws/fleet/"), connect)
        page.goto("/runs/")
        loss = page.locator(f'tr[data-run="{run}"] [data-cell="loss"]')
        site.log(run, 1, 1, loss=4.0)
        expect(loss).to_have_text(re.compile("^4"))
        refused.append(True)
        sockets[-1].close()
        expect(page.locator("#connection")).to_be_visible()
        site.log(run, 2, 1, loss=3.0)
        page.wait_for_timeout(1500)  # no socket receives the progress frame
        refused.clear()
        expect(loss).to_have_text(re.compile("^3"))


def test_a_late_answer_does_not_replace_newer_values(browser: Browser, site: Site) -> None:
    """Rows that are refetched after a break can be older than frames that arrived meanwhile."""
    run, sockets, delayed = site.external("late answer"), [], []

    def connect(socket: WebSocketRoute) -> None:
        socket.connect_to_server()
        sockets.append(socket)

    def delay(route: Route) -> None:
        if route.request.resource_type == "fetch":
            delayed.append((route, route.fetch()))  # rendered now, delivered later
        else:
            route.continue_()

    with browser.new_context(base_url=site.url) as context:
        context.add_cookies([site.session()])
        page = context.new_page()
        page.route_web_socket(re.compile("/ws/fleet/"), connect)
        page.route("**/runs/", delay)
        page.goto("/runs/")
        loss = page.locator(f'tr[data-run="{run}"] [data-cell="loss"]')
        site.log(run, 1, 1, loss=4.0)
        expect(loss).to_have_text(re.compile("^4"))
        sockets[-1].close()
        while not delayed:  # the page has reconnected and refetches its rows
            page.wait_for_timeout(50)
        site.log(run, 2, 1, loss=3.0)
        expect(loss).to_have_text(re.compile("^3"))
        row = page.locator(f'tr[data-run="{run}"]').element_handle()
        (route, response), *_ = delayed
        route.fulfill(response=response)
        wait_until(page, "(row) => !row.isConnected", row)
        expect(loss).to_have_text(re.compile("^3"))


def test_selected_rows_a_saved_view_and_the_queue(visit: Visit, site: Site) -> None:
    first, second = submit(site, name="pick one"), submit(site, name="pick two")
    page = visit("/queue/")
    rows = page.locator("#queue tr[data-run]")
    expect(page.locator(f'#queue tr[data-run="{first}"]')).to_be_visible()
    third = submit(site, name="pick three")
    expect(page.locator(f'#queue tr[data-run="{third}"]')).to_be_visible()  # the row came by itself
    field = page.locator(f'#queue tr[data-run="{third}"] input[name="priority"]')
    field.fill("7")
    field.press("Enter")
    expect(rows.first).to_have_attribute("data-run", str(third))

    page.goto("/runs/?q=pick")
    page.get_by_role("button", name="save this view").click()
    page.locator('#view-dialog input[name="name"]').fill("picks")
    page.locator('#view-dialog input[name="name"]').press("Enter")
    expect(page.get_by_role("link", name="★ picks")).to_be_visible()
    page.goto("/runs/")
    page.get_by_role("link", name="★ picks").click()
    expect(page.locator("tr[data-run]")).to_have_count(3)
    page.locator(f'tr[data-run="{second}"] input').check()
    page.locator(f'tr[data-run="{third}"] input').check()
    expect(page.locator("#bulk-count")).to_have_text("2 selected")
    page.locator('#bulk-bar input[name="tag"]').fill("kept")
    page.locator('#bulk-bar input[name="tag"]').press("Enter")
    expect(page.locator(".note.good")).to_have_text("Tagged 2 runs kept.")
    page.wait_for_load_state("load")
    page.locator("#pick-all").check()
    page.locator("#bulk-bar button[value=cancel]").click()
    expect(page.get_by_role("dialog")).to_contain_text("Cancel 3 runs?")
    expect(page.get_by_role("button", name="Back")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.locator("#bulk-bar button[value=cancel]").click()
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    expect(page.locator(".note.good")).to_have_text("Cancelling 3 runs.")
    expect(page.locator("tr[data-run] .state-cancelled")).to_have_count(3)
