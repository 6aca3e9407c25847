"""Waits until an expression is true in a page, under the page's own content security policy.

Playwright's `wait_for_function` compiles its text inside the page, and the policy forbids that
(`script-src 'self'` without `unsafe-eval`). `evaluate` is not subject to the policy.
"""

from __future__ import annotations

import time
from typing import Any

from playwright.sync_api import Error, Page

_INTERVAL_MS = 50


def wait_until(page: Page, expression: str, arg: Any = None, *, timeout_s: float = 90) -> None:
    """Poll `expression` (or a function of `arg`) until it is true.

    The timeout in seconds is against hangs only. Raises AssertionError with the last error of the
    page, for example a name that is not defined.
    """
    last: Error | None = None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if page.evaluate(expression, arg):
                return
        except Error as error:  # a navigation destroys the context; its successor follows
            last = error
        page.wait_for_timeout(_INTERVAL_MS)
    raise AssertionError(f"Never true: {expression}. Last error: {last}")
