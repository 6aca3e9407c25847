"""axe-core on every page, in both themes and at two widths, and no page wider than a phone."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from playwright.sync_api import Browser

from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.dashboards import services as dashboards
from orchestrator.reports import comments as report_comments
from orchestrator.reports import services as reports
from orchestrator.reports import share_links
from orchestrator.reports.models import Report
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from orchestrator.telemetry.services import Lines
from tests import factories
from tests.browser.logged_in_page import opened
from workers.contracts.wire.points import PointBatch

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
RUN = """async ({context, ...options}) => {
  const all = {...options, resultTypes: ["violations"]};
  const {violations} = await axe.run(context ?? document, all);
  const places = (nodes) => nodes.slice(0, 3).map((node) => node.target.join(" ")).join(" | ");
  return violations.map((one) => `${one.id}: ${places(one.nodes)}`);
}"""
OF_COLORS = {"runOnly": ["color-contrast", "link-in-text-block"]}
# points of the planner's scatter and parts of its treemap have the size of their numbers; tables
# below have the same content
OF_SIZES = {
    "context": {"exclude": [[".scatter"], [".treemap"]]},
    "runOnly": ["color-contrast", "scrollable-region-focusable", "target-size"],
}
WIDE = """() => {
  if (document.documentElement.scrollWidth <= innerWidth) return [];
  const out = (one) => one.getBoundingClientRect().right > innerWidth + 1;
  const outside = [...document.querySelectorAll("main *")].filter(out).slice(0, 3);
  return [`wider than the window: ${outside.map((one) => one.className)}`];
}"""
# the address of every page without a run
PLAIN = [
    "/",
    "/runs/",
    "/runs/new/",
    "/runs/new/?kind=serve",
    "/data/",
    "/data/sets/",
    "/data/reviews/",
    "/data/comparisons/",
    "/fleet/",
    "/fleet/n1/",
    "/fleet-over-time/",
    "/fleet/n1/drain/",
    "/dead-letters/",
    "/join-node/",
    "/engines/",
    "/queue/",
    "/sweeps/",
    "/sweeps/new/",
    "/simulator/",
    "/experiments/",
    "/experiments/new/",
    "/experiments/solved-problems/",
    "/reports/",
    "/reports/new/",
    "/dashboards/",
    "/dashboards/new/",
    "/planner/",
    "/planner/serving/",
    "/planner/scaling/",
    "/planner/examples/",
    "/planner/accuracy/",
    "/planner/saved/",
    "/account/",
    "/account/password/",
    "/account/tokens/",
    "/account/audit/",
    "/account/people/",
    "/account/teams/",
    "/account/notifications/",
    "/account/exports/",
    "/account/usage/",
    "/account/storage/",
    "/account/jobs/",
    "/account/settings/",
    "/gallery/",
    "/health/",
]
TABS = (
    "summary",
    "performance",
    "memory",
    "numerics",
    "dashboards",
    "logs",
    "checkpoints",
    "config",
    "history",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> None:
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path / "home"})


@pytest.fixture
def pages(live_server: Any) -> list[str]:
    """The addresses of all pages, with a run in each state that looks different."""
    owner = factories.user("owner", Role.ADMIN)
    node = factories.node("n1")
    experiment = runs.experiment_create(owner=owner, name="Learning rates")
    trained, failed = (_run(owner, experiment, name) for name in ("trained", "failed"))
    waiting = factories.run(owner, name="waits")
    for run in (trained, failed):
        factories.running(run, node)
        names = ("loss", "tokens_per_s", "mfu", "step_time_s", "memory/params_bytes", "grad_norm")
        steps = list(range(1, 31))
        batch = PointBatch(
            run=str(run.pk),
            attempt=1,
            rank=0,
            seq=steps,
            step=steps,
            tokens=[64 * step for step in steps],
            time=[time.time() - 30 + step for step in steps],
            values={name: [1.0 + 1 / step for step in steps] for name in names},
        )
        telemetry.points_store(run=run, attempt=1, batches=[batch])
        lines = ["starting", "ValueError: the learning rate must be positive"]
        telemetry.logs_store(run=run, attempt=1, batches=[(0, Lines(1, time.time(), lines))])
    reason = {"class": "user_error", "reason": "ValueError", "rank": 0}
    ended = timezone.now() + timedelta(seconds=1)
    Run.objects.filter(pk=failed.pk).update(state="failed", ended=ended, exit=reason)
    telemetry.summaries_refresh(limit=9, wait=False)
    report, shared = _report(owner, trained)
    served = factories.run(owner, kind="serve", train=None, plan={}, serve={})
    factories.running(served, node)
    panels = dashboards.suggested(["loss", "grad_norm"], several=True)
    board = dashboards.dashboard_create(owner=owner, name="d", spec=panels, experiment=experiment)
    return [
        *PLAIN,
        f"/dashboards/{board.pk}/",
        f"/dashboards/{board.pk}/?edit=1",
        f"/experiments/{experiment.pk}/",
        f"/runs/compare/?runs={trained.pk},{failed.pk}",
        *(f"/reports/{report.pk}/{page}" for page in ("", "edit/", "versions/", "share/")),
        shared,
        f"/runs/{waiting.pk}/",
        f"/runs/{failed.pk}/",
        *(f"/runs/{trained.pk}/?tab={tab}" for tab in TABS),
        *(f"/runs/{served.pk}/?tab={tab}" for tab in ("chat", "summary", "requests", "cache")),
    ]


def _run(owner: User, experiment: Any, name: str) -> Run:
    return runs.run_submit(owner=owner, name=name, spec=factories.spec(), experiment=experiment)


def _report(owner: User, run: Run) -> tuple[Report, str]:
    """A report with each part, and the address of its share link."""
    blocks = (
        f"```runs frozen\nruns: {run.pk}\ncolumns: loss, model\n```",
        f"```panel\nkind: line\nmetrics: [loss]\nruns: {{runs: [{run.pk}]}}\n```",
        "```runs\nquery: loss > > 1\n```",
    )
    text = "\n\n".join(("# One", f"run:{run.pk}", "## Two", *blocks, "# Three", "| a |\n|---|"))
    report = reports.report_create(owner=owner, title="Learning rates", text=text)
    reports.report_update(report=report, by=owner, version=1, text=f"{text}\n\nMore.")
    comment = report_comments.comment_create(report=report, by=owner, text="Why?")
    report_comments.comment_create(report=report, by=owner, text="So.", parent=comment)
    link = share_links.link_create(report=report, by=owner, note="reviewers")
    return report, share_links.link_path(link)


def test_no_page_has_an_axe_violation_or_overflows(
    browser: Browser, live_server: Any, pages: list[str]
) -> None:
    """Each page is loaded once: all rules on a wide screen in light, then colors in dark, and
    sizes on a phone. No page requests what the server refuses.
    """
    if not AXE.exists():
        missing = "axe-core is not installed: run make install-test"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    faults: list[str] = []
    refused: list[str] = []
    with opened(browser, live_server, "/account/", bypass_csp=True) as page:
        page.on(
            "response",
            lambda answer: (
                refused.append(f"{answer.status} {answer.url}")
                if answer.status >= 400 and answer.request.resource_type != "document"
                else None
            ),
        )
        for address in pages:
            page.set_viewport_size({"width": 1440, "height": 900})
            page.emulate_media(color_scheme="light")
            answer = page.goto(address, wait_until="load")
            assert answer is not None and answer.status in (200, 503), f"{address}: {answer}"
            page.evaluate(AXE.read_text())
            violations = page.evaluate(RUN, {})
            page.emulate_media(color_scheme="dark")
            violations += page.evaluate(RUN, OF_COLORS)
            page.set_viewport_size({"width": 390, "height": 900})
            violations += page.evaluate(RUN, OF_SIZES) + page.evaluate(WIDE)
            faults += [f"{address} {one}" for one in (*dict.fromkeys(violations), *refused)]
            refused.clear()
    assert not faults, "\n".join(faults)
