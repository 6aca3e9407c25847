"""Pages of the test's own web process and database, opened as its owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from playwright.sync_api import Browser, Page, TimeoutError

from orchestrator.accounts.models import User
from tests import factories


@contextmanager
def opened(browser: Browser, live_server: Any, address: str, **context: Any) -> Iterator[Page]:
    """A page of the logged-in owner.

    At its end no script may have failed and no other host been contacted.
    """
    made = browser.new_context(base_url=live_server.url, **context)
    cookie = factories.client_for(User.objects.get(username="owner")).cookies["sessionid"]
    made.add_cookies([{"name": "sessionid", "value": cookie.value, "url": live_server.url}])
    page, wrong = made.new_page(), []
    page.set_default_timeout(90_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: None if ours(request.url, live_server.url) else wrong.append(request.url),
    )
    page.goto(address)
    yield page
    made.close()
    assert not wrong, wrong


def jump(page: Page, first: str, second: str, address: str) -> None:
    """Goes where two keys lead.

    A page forgets a first one that the second comes late after: both are pressed again.
    """
    for _ in range(9):
        page.keyboard.press(first)
        page.keyboard.press(second)
        with suppress(TimeoutError):
            page.wait_for_url(address, timeout=10_000)
            return
    raise AssertionError(f"{first} {second} did not lead to {address}, but to {page.url}")


def ours(url: str, server: str) -> bool:
    host = server.removeprefix("http://")
    return url.startswith((f"http://{host}", f"ws://{host}", "data:", "blob:"))
