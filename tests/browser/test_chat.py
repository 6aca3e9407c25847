"""Chat box of a served model in Chromium: streaming, stop, and the server's error messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.site import Site
from tests.flows.embedded import ROOT
from tests.orchestrator.api.fake_server import ModelServer, Thread

pytestmark = pytest.mark.browser

_SERVE = """
import sys, django
django.setup()
from orchestrator.accounts.models import User
from orchestrator.runs.models import Attempt, Run
from tests import factories
from tests.orchestrator.api.fake_server import serves
if sys.argv[1] == "begin":
    owner = User.objects.get(username="owner")
    run = factories.run(owner, kind="serve", train=None, plan={})
    print(run.pk, factories.running(run, factories.node("n-chat")).fence)
else:
    run = Run.objects.get(pk=sys.argv[2])
    serves(run, Attempt.objects.get(run=run), int(sys.argv[3]))
"""


def in_site(site: Site, *words: str) -> str:
    command = [sys.executable, "-c", _SERVE, *words]
    done = subprocess.run(command, env=site.environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def test_a_conversation_that_is_streamed_and_stopped(
    visit: Callable[..., Page], site: Site
) -> None:
    run, fence = in_site(site, "begin").split()
    server = ModelServer(fence)
    with Thread(server.app) as below:
        page: Any = visit(f"/runs/{run}/", viewport={"width": 390, "height": 800})
        expect(page.locator("#chat-waiting")).to_contain_text("is loading its model")
        expect(page.locator("#chat-send")).to_be_disabled()
        in_site(site, "serve", run, str(below.port))
        expect(page.locator("#chat-send")).to_be_enabled()  # the page noticed by itself
        page.wait_for_load_state("load")  # and listens
        page.fill("#chat-system", "Be brief.")
        page.fill("#chat-text", "count")
        page.press("#chat-text", "Enter")
        server.go_on.release()
        answer = page.locator("#chat-log .assistant")
        expect(answer).to_have_text("one ")
        server.go_on.release(2)
        expect(answer).to_have_text("one two three")
        expect(page.locator("#chat-stop")).to_be_hidden()
        expect(page.locator("#chat-numbers")).to_contain_text("time to first token")
        assert [each["role"] for each in server.calls[-1]["messages"]] == ["system", "user"]
        page.fill("#chat-text", "again")
        page.press("#chat-text", "Enter")
        server.go_on.release()
        expect(answer.nth(1)).to_have_text("one ")
        page.click("#chat-stop")
        assert server.freed.acquire(timeout=90)
        expect(answer.nth(1)).to_have_class("assistant stopped")
        assert [each["role"] for each in server.calls[-1]["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        # leaving the page ends an answer and frees its request; the conversation stays
        page.fill("#chat-text", "more")
        page.press("#chat-text", "Enter")
        server.go_on.release()
        expect(answer.nth(2)).to_have_text("one ")
        page.goto(f"/runs/{run}/?tab=config")
        assert server.freed.acquire(timeout=90)
        page.goto(f"/runs/{run}/")
        expect(page.locator("#chat-log .user")).to_have_count(3)
        expect(answer.nth(2)).to_have_text("one ")
        expect(answer.nth(2)).to_have_class("assistant stopped")
        expect(page.locator("#chat-send")).to_be_enabled()
    page.fill("#chat-text", "anybody there?")
    page.press("#chat-text", "Enter")
    expect(page.locator("#chat-log .failed")).to_contain_text("server does not")
