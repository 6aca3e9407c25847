"""The code tab in a real Chromium: colored changes, and nothing is wider than a phone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from orchestrator.accounts.models import User
from orchestrator.runs.submission.submit import run_submit
from tests.browser.logged_in_page import opened
from tests.orchestrator.runs.test_code import in_git, repository

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]


@pytest.mark.parametrize("width", [1440, 390])
def test_changes_are_readable_at_any_width(
    browser: Browser, live_server: Any, owner: User, data_root: Path, live_redis: str, width: int
) -> None:
    top = repository(data_root)
    lines = [f"layer_{n} = build(width={n}, activation='gelu', bias=False)\n" for n in range(40)]
    (top / "src" / ("a" * 60 + ".py")).write_text("x = " + "1 + " * 400 + "1\n")
    (top / "src" / "train.py").write_text("".join(lines))
    in_git(top, "remote", "set-url", "origin", "https://git.example.org/" + "long/" * 20 + "a.git")
    script = {"command": ["train.py"], "workdir": str(top / "src")}
    run = run_submit(owner=owner, name="coded", spec={"kind": "script", "script": script})
    spec = {"kind": "script", "script": {"command": ["true"]}}
    empty = run_submit(owner=owner, name="empty", spec=spec)
    for address in (
        f"/runs/{run.pk}/?tab=code",
        f"/runs/{run.pk}/?tab=code&file=src/train.py",
        f"/runs/{empty.pk}/?tab=code",
    ):
        with opened(browser, live_server, address) as page:
            page.set_viewport_size({"width": width, "height": 900})
            if address == f"/runs/{run.pk}/?tab=code":
                added = page.locator(".diff-lines .add").first
                expect(added).to_be_visible()
                color = "node => getComputedStyle(node).backgroundColor"
                removed = page.locator(".diff-lines .del").first
                assert added.evaluate(color) != removed.evaluate(color)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if os.environ.get("SHOTS"):
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_timeout(500)
                    name = f"{os.environ['SHOTS']}/code-{width}-{scheme}-{len(address)}.png"
                    page.screenshot(path=name, full_page=True)
