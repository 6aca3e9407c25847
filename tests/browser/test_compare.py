"""Charts of the Compare page and widths of columns in Chromium."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.site import Site

pytestmark = pytest.mark.browser
Visit = Callable[..., Page]


def sweep(site: Site, count: int = 8) -> list[str]:
    """External runs whose loss falls with their learning rate; two widths, two seeds."""
    ids = []
    for i in range(count):
        run, lr = site.external(f"sweep {i}"), 10.0 ** (-4 + i / 3)
        config = {"lr": lr, "width": (128, 256)[i % 2], "seed": 1_234_567_891 + 2 * (i // 2 % 2)}
        answer = site.client.patch(f"runs/{run}/details", json={"config": config})
        assert answer.status_code == 200, answer.text
        for step in (1, 40):
            site.log(run, step, 39 if step == 1 else 1, loss=2 + math.exp(-step * lr) + i / 100)
        ids.append(run)
    site.refresh_summaries()
    return ids


def test_compare_groups_subtracts_and_relates(visit: Visit, site: Site) -> None:
    ids = sweep(site)
    page = visit(f"/runs/compare/?runs={','.join(ids)}&group=config.width")
    card, relations = page.locator("#curves"), page.locator("#relations")
    expect(card).to_have_attribute("data-drawn", "6")  # per width two edges and a mean
    expect(card.locator(".legend")).to_contain_text("config.width = 256")
    page.select_option("[data-group]", "config.seed")
    expect(card.locator(".legend")).to_contain_text("config.seed = 1234567893")
    expect(card).to_have_attribute("data-drawn", "6")
    page.select_option("[data-group]", "")
    menu, add = card.locator("details.menu > summary"), card.locator('[data-do="dashboard"]')
    menu.click()
    expect(add).to_be_visible()
    menu.click()
    page.select_option("[data-baseline]", ids[0])
    menu.click()
    expect(add).to_be_hidden()  # no panel draws differences
    menu.click()
    expect(card).to_have_attribute("data-drawn", "8")
    expect(card.locator(".ytitle")).to_have_text(f"loss, difference to run {ids[0]}")
    for kind, marks in (
        ("scatter", ".scatterlayer .point"),
        ("parallel", ".scatterlayer .js-line"),
        ("box", ".boxlayer .box"),
        ("importance", ".barlayer .point"),
    ):
        page.select_option("[data-kind]", kind)
        expect(relations).to_have_attribute("data-drawn", kind)
        expect(relations.locator(marks).first).to_be_attached()
    expect(relations.locator("[data-note]")).to_contain_text("Spearman")
    expect(relations.locator(".ytick").last).to_have_text("config.lr ")
    assert "r-kind=importance" in page.url and f"base={ids[0]}" in page.url
    page.select_option("[data-kind]", "error")
    expect(relations.locator("[data-note]")).to_contain_text("None of these runs has a prediction")


def test_an_expired_login_is_reported(visit: Visit, site: Site) -> None:
    ids = sweep(site, 2)
    page = visit(f"/runs/compare/?runs={','.join(ids)}")
    relations, text = page.locator("#relations"), "Your login has expired. Reload the page."
    expect(relations).to_have_attribute("data-drawn", "scatter")
    page.locator("#curves details.menu > summary").click()
    page.locator('#curves [data-do="dashboard"]').click()
    expect(page.locator("dialog[open]")).to_be_visible()
    page.context.clear_cookies(name="sessionid")
    page.select_option("dialog [name=target]", "new")
    page.locator("dialog [name=name]").fill("Curves")
    page.locator("dialog button[type=submit], dialog .primary").first.click()
    expect(page.locator("dialog [data-error]")).to_have_text(text)
    page.locator("dialog [data-cancel]").click()
    page.locator("#curves details.menu > summary").click()
    page.locator('#curves [data-do="dashboard"]').click()
    expect(page.locator(".toast")).to_contain_text(text)
    page.select_option("[data-axis]", "time")
    expect(page.locator("#curves [data-note]")).to_have_text(text)
    page.select_option("[data-kind]", "importance")
    expect(relations.locator("[data-note]")).to_have_text(text)


def test_the_menus_work_before_the_charts_are_drawn(visit: Visit, site: Site) -> None:
    ids = sweep(site, 2)
    page = visit("/runs/")
    page.route("**/runs/compare/curves/*", lambda route: route.abort())
    page.route("**/runs/compare/values/*", lambda route: None)  # never answered
    page.goto(f"/runs/compare/?runs={','.join(ids)}")
    for count, card in enumerate(("#curves", "#relations"), 1):
        page.locator(f"{card} details.menu > summary").click()
        page.locator(f'{card} [data-do="png"]').click()
        expect(page.locator(".toast")).to_have_count(count)
        expect(page.locator(".toast").last).to_contain_text("The chart is not drawn.")


def test_columns_are_resized_by_the_keyboard(visit: Visit, site: Site) -> None:
    site.external("resized")
    page = visit("/runs/?columns=model,age")
    grip = page.locator('th[data-key="model"] .column-grip')
    grip.focus()
    before = page.locator('th[data-key="model"]').evaluate("head => head.offsetWidth")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    expect(grip).to_have_attribute("aria-valuenow", str(before + 150))
    assert f"widths=model%3A{before + 150}" in page.url
    page.reload()
    head = page.locator('th[data-key="model"]')
    expect(head).to_have_class("sized")
    assert head.evaluate("head => head.offsetWidth") == before + 150
    assert "widths=" in str(page.locator('th[data-key="age"] a').get_attribute("href"))
    page.locator('th[data-key="model"] .column-grip').press("Home")
    assert "widths" not in page.url
