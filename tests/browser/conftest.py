"""Fixtures: Chromium and a web process. Without Chromium tests are skipped, except under CI."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests import factories
from tests.browser.site import Site, chromium
from tests.migrated_database import install
from tests.redis_server import RedisServer

PATIENCE_MS = 90_000  # against hangs only
expect.set_options(timeout=PATIENCE_MS)  # its own would be 5 s
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One a module: playwright's loop runs in this thread, and other modules' tests ask the
    database from it.
    """
    path = chromium()
    if path is None:
        missing = "No Chromium on this machine: install one, or name it in CHROMIUM."
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield made
        made.close()


@pytest.fixture(scope="package")
def site(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, migrated_database: Path
) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("site")
    install(migrated_database, home)
    made = Site(home, redis_server.url)
    made.start()
    yield made
    made.close()


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Callable[..., Page]]:
    """`visit(address, **context)` opens a page of the logged-in owner.

    At the end no script may have failed, and no other host may have been contacted.
    """
    contexts, wrong = [], []

    def open_page(address: str, **options: Any) -> Page:
        context = browser.new_context(base_url=site.url, **options)
        context.set_default_timeout(PATIENCE_MS)
        context.add_cookies([site.session()])
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: None if _ours(request.url, site.url) else wrong.append(request.url),
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, wrong


@pytest.fixture(scope="module")
def database_from_here() -> Iterator[None]:
    """Playwright's loop runs in this thread, and between its steps the tests ask the database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        yield


@pytest.fixture
def owner(live_server: Any) -> Any:
    return factories.people().owner


@pytest.fixture
def home(site: Site) -> Path:
    return site.home


def _ours(address: str, site: str) -> bool:
    return (
        re.match(rf"(http|ws)://{re.escape(site.removeprefix('http://'))}/|data:|blob:", address)
        is not None
    )
