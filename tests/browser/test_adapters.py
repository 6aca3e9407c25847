"""The adapters card of a served run in Chromium: loads, unloads, and shows what was refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests import factories
from tests.browser.logged_in_page import opened
from tests.orchestrator.api.fake_server import ModelServer, Thread, serves
from workers.contracts.wire.serving_reports import ServedAdapter

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]


def test_adapters_are_loaded_and_unloaded_on_the_page(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    run = factories.run(owner, kind="serve", train=None, plan={}, serve={"adapter_slots": 2})
    attempt = factories.running(run, factories.node("n1"))
    server = ModelServer(attempt.fence)
    mine = ServedAdapter(name="support-tone", path="/data/a", rank=8, slot=0, active=2, requests=31)
    server.state = server.state.model_copy(update={"adapters": [mine], "adapter_slots": 2})
    calls: list[tuple[str, Any]] = []

    def answer(route: Route) -> None:
        calls.append((route.request.url.rpartition("/")[2], route.request.post_data_json))
        if len(calls) == 1:
            error = {"message": "/x is DoRA, whose norms depend on the whole weight", "code": "x"}
            route.fulfill(status=400, json={"error": error})
        else:
            route.fulfill(status=200, body="Success")

    with Thread(server.app) as below:
        serves(run, attempt, below.port)
        with opened(browser, live_server, f"/runs/{run.pk}/?tab=requests") as page:
            page.route("**/serve/**", answer)
            card = page.locator("#adapters")
            expect(card.get_by_text("support-tone")).to_be_visible()
            for width in (390, 1440):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                if os.environ.get("SHOTS"):
                    for scheme in ("light", "dark"):
                        page.emulate_media(color_scheme=scheme)
                        card.screenshot(path=f"/tmp/shots/adapters-{width}-{scheme}.png")
            card.get_by_label("Name").fill("legal")
            card.get_by_label("Adapter").fill("runs/3/checkpoints")
            for expected in ("is DoRA", "legal: loaded"):
                card.get_by_role("button", name="Load adapter").click()
                expect(page.locator("#adapter-answer")).to_contain_text(expected)
            card.get_by_role("button", name="Unload").click()
            expect(page.locator("#adapter-answer")).to_contain_text("support-tone: unloaded")
    body = {"lora_name": "legal", "lora_path": "runs/3/checkpoints"}
    assert calls == [
        ("load_lora_adapter", body),
        ("load_lora_adapter", body),
        ("unload_lora_adapter", {"lora_name": "support-tone"}),
    ]
