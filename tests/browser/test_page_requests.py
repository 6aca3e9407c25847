"""What pages show for an expired login and for a slow network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.polling import wait_until
from tests.browser.site import Site

pytestmark = pytest.mark.browser
Visit = Callable[..., Page]
TEXT = "Your login has expired. Reload the page."


def expire(page: Page) -> None:
    page.context.clear_cookies(name="sessionid")


def test_every_kind_of_request_shows_an_expired_login(visit: Visit, site: Site) -> None:
    """Overview and charts showed nothing; htmx put the login page into the middle of a page."""
    run = site.external("short login")
    site.log(run, 1, 20, loss=2.0)
    site.refresh_summaries()
    notice = {"has_text": TEXT}

    page = visit("/")  # a part that is fetched again
    expire(page)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#login-expired", **notice)).to_be_visible()

    page = visit(f"/runs/{run}/")  # charts
    wait_until(page, "window.orrery?.charts?.charts[0].drawn")
    expire(page)
    page.get_by_role("button", name="time", exact=True).click()
    expect(page.locator("#login-expired", **notice)).to_be_visible()
    expect(page.locator('[data-panel="loss"] .chart-note')).to_contain_text(TEXT)

    page = visit("/planner/")  # numbers
    expire(page)
    page.fill("[name=global_batch_size]", "256")
    expect(page.locator("#login-expired", **notice)).to_be_visible()

    page = visit("/reports/new/")  # a preview; the text stays
    page.fill("#source", "# Results")
    expire(page)
    page.locator("#source").press_sequentially(" of today")
    expect(page.locator("#preview-state")).to_have_text(TEXT)
    expect(page.locator("#source")).to_have_value("# Results of today")

    page = visit("/queue/")  # htmx
    expire(page)
    page.evaluate("htmx.ajax('GET', '/queue/', {target: 'main', swap: 'innerHTML'})")
    expect(page.locator("#login-expired", **notice)).to_be_visible()
    expect(page.locator("main h1")).to_have_text("Queue")
    assert page.locator("[name=password]").count() == 0
    page.locator("#login-expired button").click()
    page.wait_for_url("**/login/?next=/queue/")


def test_a_401_of_htmx_shows_one_notice(visit: Visit) -> None:
    """A second notice named status 401, and the control plane seemed not to answer."""
    page = visit("/queue/")
    page.route("**/queue/?401", lambda route: route.fulfill(status=401, body="expired"))
    page.evaluate("htmx.ajax('GET', '/queue/?401', {source: '#outages', target: '#outages'})")
    expect(page.locator("#login-expired", has_text=TEXT)).to_be_visible()
    expect(page.locator("#toasts .toast")).to_have_count(1)
    expect(page.locator("#outages")).not_to_contain_text("does not answer")


def test_a_slow_network_is_announced_until_the_answer_arrives(visit: Visit, site: Site) -> None:
    """At 50 kB/s charts stayed blank, and the page looked live."""
    run = site.external("far away")
    site.log(run, 1, 20, loss=2.0)
    site.refresh_summaries()
    held: list[Route] = []
    slow = True

    def hold(route: Route) -> None:
        held.append(route) if slow else route.continue_()

    page = visit("/runs/")
    page.route(f"**/api/v1/runs/{run}/**", hold)
    page.goto(f"/runs/{run}/")
    expect(page.locator("#slow")).to_be_visible()
    expect(page.locator("#slow")).to_contain_text("Still waiting for the server")
    slow = False
    for route in held:
        route.continue_()
    expect(page.locator("#slow")).to_be_hidden()
    wait_until(page, "window.orrery?.charts?.charts[0].drawn")
