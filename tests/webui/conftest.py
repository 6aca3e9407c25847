"""A fixture of the tests that count a page's queries."""

from __future__ import annotations

import math

import pytest

from webui.views import outages


@pytest.fixture
def outages_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is down has just been read: one reading serves all pages of a process for 5 s.

    `test_outages.py` counts the queries of a reading.
    """
    monkeypatch.setattr(outages, "_newest", (math.inf, []))
