"""Three tasks of a newcomer from Overview: at most 4 clicks each, at most 100 words to read.

Words are those that a person reads to decide on the next click: the page's headline sentence, the
label that is clicked, and the text that answers the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.polling import wait_until
from tests.browser.site import Site

pytestmark = pytest.mark.browser
Visit = Callable[..., Page]
MOST_CLICKS = 4
MOST_WORDS = 100


@dataclass
class Path:
    """Counts clicks and the words that are read on the way."""

    page: Page
    clicks: int = 0
    read: list[str] = field(default_factory=list)

    def see(self, what: Locator) -> str:
        """Read a text of the page."""
        expect(what.first).to_be_visible()
        text = " ".join(what.first.inner_text().split())
        self.read.append(text)
        return text

    def click(self, what: Locator) -> None:
        """Read a label and click it."""
        label = what.first.inner_text() or what.first.get_attribute("aria-label") or ""
        self.read.append(" ".join(label.split()))
        what.first.click()
        self.clicks += 1

    @property
    def words(self) -> int:
        return sum(len(text.split()) for text in self.read)

    def done(self, task: str) -> None:
        """Report and check both numbers."""
        print(f"{task}: {self.clicks} clicks, {self.words} words")
        assert self.clicks <= MOST_CLICKS, (task, self.clicks)
        assert self.words <= MOST_WORDS, (task, self.words, self.read)


@pytest.fixture
def thirty(site: Site) -> list[str]:
    """Thirty finished runs of an experiment; the learning rate 3e-3 is best; one run failed."""
    runs = []
    for i in range(30):
        lr = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)[i % 5]
        body = {"name": f"rate {lr:g}, seed {i // 5}", "spec": {"kind": "external"}}
        run = site.client.post("runs", json={**body, "experiment": "Learning rates"}).json()["id"]
        config = {"config": {"lr": lr, "seed": i // 5}}
        assert site.client.patch(f"runs/{run}/details", json=config).status_code == 200
        best = 2 + abs(math.log10(lr) + 2.5) + i / 1000
        for step in (1, 100):
            site.log(run, step, 1, loss=best + 3 / step, val_loss=best + 4 / step)
        if i == 7:
            lines = ("loading", "Traceback (most recent call last):", "RuntimeError: bad data")
            site.send_log(run, 0, 1, *lines)
        state = {"state": "failed" if i == 7 else "finished"}
        assert site.client.post(f"runs/{run}/finish", json=state).status_code == 200
        runs.append(str(run))
    site.refresh_summaries()
    return runs


def test_three_tasks_of_a_newcomer(visit: Visit, site: Site, thirty: list[str]) -> None:
    page = visit("/")
    path = Path(page)
    # the best of 30 runs, and in what it differs
    path.click(page.get_by_role("link", name="Experiments", exact=True))
    path.click(page.get_by_role("link", name="Learning rates"))
    assert "by run" in path.see(page.locator(".sentence"))
    path.click(page.get_by_role("link", name="Compare runs"))
    assert "30 external runs" in path.see(page.locator(".sentence"))
    differs = page.locator("section:has(#differs-title)")
    path.see(differs.locator("h2"))
    assert "config.lr" in path.see(differs.locator("tbody tr").first)
    path.done("the best run of 30 and its differences")

    # why a run failed
    page.goto("/")
    path = Path(page)
    path.click(page.get_by_role("link", name="Runs", exact=True))
    path.click(page.locator(".chips a", has_text="failed"))
    path.click(page.get_by_role("link", name="rate 0.001, seed 1"))
    path.see(page.locator(".sentence"))
    assert "RuntimeError: bad data" in path.see(page.locator(".failure"))
    path.done("why a run failed")

    # a figure for a paper
    page.goto("/")
    path = Path(page)
    path.click(page.get_by_role("link", name="Runs", exact=True))
    path.click(page.get_by_role("link", name="rate 0.01, seed 5"))
    wait_until(page, "window.orrery?.charts?.charts[0].drawn")
    loss = page.locator('[data-panel="loss"]')
    path.see(loss.locator("h2"))
    path.click(loss.locator("summary"))
    with page.expect_download() as download:
        path.click(loss.get_by_role("button", name="Download PNG"))
    assert download.value.suggested_filename.endswith(".png")
    path.done("export a figure")
