"""The data page in a real Chromium: the histogram is drawn, and nothing is wider than a phone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.logged_in_page import opened

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_draws_its_charts_at_any_width(
    browser: Browser, live_server: Any, owner: Any, data_root: Path, width: int
) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}+{n}? " * (1 + n % 9)},
                {"role": "assistant", "content": f"It is {2 * n}."},
            ]
        }
        for n in range(60)
    ]
    (data_root / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for address in ("/data/?path=sums.jsonl&seq_len=256", "/data/"):
        viewport = {"width": width, "height": 900}
        with opened(browser, live_server, address, viewport=viewport) as page:
            if "path" in address:
                expect(page.locator("#data-histogram .bars .point")).not_to_have_count(0)
                expect(page.locator(".tokens .trained").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if os.environ.get("SHOTS"):
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_timeout(500)
                    name = f"/tmp/shots/data-{width}-{scheme}-{len(address)}.png"
                    page.screenshot(path=name, full_page=True)
