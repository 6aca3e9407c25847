"""First use in Chromium: `up`, log in, submit the form, watch the loss curve."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.polling import wait_until
from tests.flows.embedded import Orrery, train_spec
from tests.flows.gate import Gate, drained
from tests.migrated_database import install

pytestmark = [pytest.mark.browser, pytest.mark.flow, pytest.mark.timeout(900)]


@pytest.fixture
def orrery(tmp_path: Path, migrated_database: Path) -> Iterator[Orrery]:
    made = Orrery(tmp_path / "home", devices=2)
    install(migrated_database, made.home)
    made.start()
    yield made
    made.close()


def test_a_run_submitted_by_the_form_draws_its_loss_without_a_reload(
    browser: Browser, orrery: Orrery
) -> None:
    name, password = (orrery.home / "first-login").read_text().split()
    context = browser.new_context(base_url=orrery.url)
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto("/runs/new/")
    page.fill("[name=username]", name)
    page.fill("[name=password]", password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(lambda url: "/login" not in url)
    page.goto("/runs/new/")
    page.fill("[name=name]", "first of mine")
    page.fill("#spec-json", json.dumps(train_spec(steps=150, ranks=2)))
    with drained(orrery):
        page.get_by_role("button", name="Submit run").click()
        page.wait_for_url(re.compile(r"/runs/\d+/$"))
        gate = Gate(orrery, page.url.split("/")[-2])
    page.evaluate("window.marked = true")
    loss = "orrery.charts.held().loss"
    first = gate.to(10)
    wait_until(page, f"window.orrery?.charts && {loss}.last?.x === {first}")
    last = gate.to(first + 10)
    wait_until(page, f"{loss}.last.x === {last}")
    gate.open()
    expect(page.locator('[data-panel="loss"] .js-line').first).to_be_visible()
    expect(page.locator("#run-state")).to_have_text(re.compile("running|finished"))
    expect(page.locator("#sentence")).to_contain_text(re.compile("Step|Finished"))
    expect(page.locator("#run-state")).to_have_text("finished", timeout=240_000)
    wait_until(page, f"{loss}.last.x === 150")
    assert page.evaluate("window.marked"), "the page was reloaded"
    context.close()
    gate.close()
