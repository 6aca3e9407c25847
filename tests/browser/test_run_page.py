"""The run page in a real Chromium: live, whole after a break, small in memory, on a phone, dark, by
keys alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.logged_in_page import jump
from tests.browser.polling import wait_until
from tests.browser.site import Site

pytestmark = pytest.mark.browser

LOSS = "orrery.charts.held().loss"
Visit = Callable[..., Page]


def until_step(page: Page, step: int) -> None:
    wait_until(page, f"window.orrery?.charts && {LOSS}.last?.x === {step}")


def test_the_loss_chart_grows_without_a_reload(site: Site, visit: Visit) -> None:
    run = site.external()
    page = visit(f"/runs/{run}/")
    expect(page.locator('[data-panel="loss"] .chart-note')).to_contain_text("No data yet")
    page.evaluate("window.marked = true")
    site.log(run, 1, 30)
    until_step(page, 30)
    expect(page.locator('[data-panel="loss"] .js-line').first).to_be_visible()
    site.log(run, 31, 10)
    until_step(page, 40)
    drawn = """document.querySelector('[data-panel="loss"] .chart-plot').data?.[0].x.length"""
    wait_until(page, f"{drawn} === 40")
    assert page.evaluate("window.marked"), "the page was reloaded"
    expect(page.locator("#sentence")).to_contain_text("Step 40")
    expect(page.locator('[data-metric="loss"] [data-value]')).to_have_text("2.778")
    label = page.locator('[data-panel="loss"] .chart-plot')
    expect(label).to_have_attribute(
        "aria-label", re.compile(r"Loss\. training .* nats/token at step")
    )


def test_events_become_marks_and_not_a_number_is_shown(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 20)
    page = visit(f"/runs/{run}/")
    until_step(page, 20)
    site.send_event(run, "checkpoint_saved", step=10)
    expect(page.locator("#run-events")).to_contain_text("Checkpoint saved at step 10")
    wait_until(page, "orrery.charts.marks.length === 1")
    answer = site.client.post(
        f"runs/{run}/points",
        json={
            "points": [
                {
                    "seq": 21,
                    "step": 21,
                    "tokens": 0,
                    "time": 1e9,
                    "rank": 0,
                    "values": {"loss": "NaN"},
                }
            ]
        },
    )
    assert answer.status_code == 200, answer.text
    traces = """[...document.querySelector('[data-panel="loss"] .chart-plot').data ?? []]"""
    wait_until(
        page, f"{traces}.some((trace) => trace.text?.some((text) => text.includes('not a number')))"
    )
    wait_until(
        page, f"{traces}.some((trace) => trace.text?.includes('Checkpoint saved at step 10'))"
    )


def test_a_broken_connection_fills_its_gap(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 10)
    page = visit(f"/runs/{run}/")
    until_step(page, 10)
    wait_until(page, "orrery.live.status === 'open'")
    page.context.set_offline(True)
    page.evaluate("orrery.live.drop()")
    expect(page.locator("#connection")).to_contain_text("Reconnecting…")
    for first in range(11, 111, 10):
        site.log(run, first, 10)
    page.context.set_offline(False)
    until_step(page, 110)
    expect(page.locator("#connection")).to_be_hidden()
    assert_whole(page, 110)


def test_a_web_process_that_is_killed_and_comes_back_loses_nothing(
    site: Site, visit: Visit
) -> None:
    run = site.external()
    site.log(run, 1, 10)
    page = visit(f"/runs/{run}/")
    until_step(page, 10)
    site.kill()
    wait_until(page, "orrery.live.status === 'lost'")
    site.start()
    site.log(run, 11, 40)
    until_step(page, 50)
    assert_whole(page, 50)


def test_a_chart_library_that_fails_to_load_is_loaded_again(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 10)
    failures = []

    def fail_once(route: Route) -> None:
        if failures:
            route.fallback()
            return
        failures.append(route.request.url)
        route.abort()

    page = visit("/experiments/")
    page.route("**/plotly*.js", fail_once)
    page.goto(f"/runs/{run}/")
    until_step(page, 10)
    wait_until(page, "document.querySelector('.chart-plot .main-svg') !== null")
    assert len(failures) == 1


def assert_whole(page: Page, last: int) -> None:
    """Every step once and in order, though frames may have come twice or not at all."""
    wait_until(page, f"{LOSS}.x.length === {last}")
    assert page.evaluate(f"{LOSS}.x") == list(range(1, last + 1))
    wait_until(page, "orrery.live.stats.filled === orrery.live.stats.gaps")


def test_a_gap_frame_is_filled_by_rest(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 10)
    page = visit(f"/runs/{run}/")
    until_step(page, 10)
    page.evaluate("orrery.charts.curves.get('loss').clear()")
    page.evaluate(
        """() => { const live = orrery.live;
        const [from, to] = [live.lastSeq + 1, live.lastSeq + 5];
        live.take({epoch: live.epoch, seq: to, type: "gap", from, to}); }"""
    )
    until_step(page, 10)
    assert page.evaluate("orrery.live.stats.gaps") == 1


def test_two_hours_of_frames_stay_small_and_keep_their_spike(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 5)
    page = visit(f"/runs/{run}/")
    until_step(page, 5)
    result = page.evaluate(
        """async () => {
            const live = orrery.live;
            const {socket} = live;
            live.socket = socket.onclose = socket.onmessage = null; socket.close();
            clearInterval(live.timer);  // only the frames below
            let step = 5;
            for (let frame = 0; frame < 7200; frame++) {
                const values = [];
                for (let i = 0; i < 10; i++) {
                    step += 1;
                    values.push([step, step === 30_003 ? 99 : 2 + Math.sin(step)]);
                }
                live.take({epoch: live.epoch, seq: live.lastSeq + 1, type: "points",
                           attempt: 1, rank: 0, time: frame,
                           values: {loss: values, tokens_per_s: values, grad_norm: values}});
                if (frame % 600 === 0) await new Promise(requestAnimationFrame);
            }
            const curve = orrery.charts.curves.get("loss");
            const held = orrery.charts.held().loss.points;
            const tiles = orrery.tiles.held();
            return {held, last: curve.last.x, top: Math.max(...curve.y), tiles};
        }"""
    )
    assert result["held"] <= 1500 and result["last"] == 72_005
    assert result["top"] == 99
    assert max(result["tiles"].values()) <= 250


def test_the_address_keeps_how_one_looks(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 300)
    page = visit(f"/runs/{run}/")
    until_step(page, 300)
    page.get_by_role("button", name="tokens", exact=True).click()
    wait_until(page, f"{LOSS}.last?.x === 19200")
    page.get_by_role("slider", name="Smoothing").fill("0.9")
    page.locator('[data-panel="loss"] [data-act="logy"]').click()
    assert page.evaluate("location.search") == "?x=tokens&smooth=0.9&logy=loss"
    other = visit(f"/runs/{run}/?x=tokens&smooth=0.9&logy=loss")
    wait_until(other, f"window.orrery?.charts && {LOSS}.last?.x === 19200")
    expect(other.get_by_role("slider", name="Smoothing")).to_have_value("0.9")
    wait_until(
        other,
        """document.querySelector('[data-panel="loss"] .chart-plot')
             .layout?.yaxis.type === 'log'""",
    )


def test_a_zoom_fetches_that_window(site: Site, visit: Visit) -> None:
    run = site.external()
    for first in range(1, 8001, 2000):
        site.log(run, first, 2000)
    page = visit(f"/runs/{run}/")
    until_step(page, 8000)
    with page.expect_request(re.compile(r"curves\?.*from=4000&to=4100&name=loss")):
        page.evaluate("orrery.charts.zoom(4000, 4100)")
    wait_until(page, "orrery.charts.windows.get('loss')?.length === 101")
    assert "from=4000&to=4100" in page.evaluate("location.search")


def test_table_and_legend_say_what_the_chart_shows(site: Site, visit: Visit) -> None:
    run = site.external()
    site.log(run, 1, 5)
    page = visit(f"/runs/{run}/")
    until_step(page, 5)
    chart = page.locator('[data-panel="loss"]')
    chart.locator('[data-act="table"]').click()
    expect(chart.locator("tbody tr")).to_have_count(5)
    expect(chart.locator("tbody tr").first).to_contain_text("4.545 nats/token")
    with page.expect_download() as download:
        chart.locator("details summary").click()
        chart.locator('[data-act="csv"]').click()
    rows = download.value.path().read_text().splitlines()
    assert rows[0] == "name,attempt,rank,seq,step,tokens,time,value" and len(rows) == 6
    picture = page.evaluate("orrery.charts.charts[0].picture().layout")
    assert picture["title"]["text"].startswith("Loss, run ") and picture["showlegend"]
    assert picture["xaxis"]["title"]["text"] == "step"
    assert picture["yaxis"]["title"]["text"] == "Loss (nats/token)"


def test_logs_come_live_and_fold(site: Site, visit: Visit) -> None:
    run = site.external()
    page = visit(f"/runs/{run}/?tab=logs")
    expect(page.locator("#log-empty")).to_contain_text("No log lines yet")
    wait_until(page, "orrery.live.status === 'open'")
    site.send_log(run, 0, 1, "loading", "<i>step</i> 1")
    site.send_log(run, 1, 1, "loading")
    expect(page.locator("#log li")).to_have_count(2)
    first = page.locator("#log li").first
    expect(first).to_have_text(re.compile(r"^\d\d:\d\d:\d\dinfo0–1loading$"))
    expect(page.locator("#log")).to_contain_text("<i>step</i> 1")


def test_a_state_that_changes_is_announced(site: Site, visit: Visit) -> None:
    run = site.external()
    page = visit(f"/runs/{run}/")
    wait_until(page, "orrery.live.status === 'open'")
    site.client.post(f"runs/{run}/finish", json={"status": "failed", "reason": "The power went."})
    expect(page.locator("#run-state")).to_contain_text("failed")
    expect(page.locator("#announce")).to_contain_text("The run is now failed.")
    expect(page.locator("#sentence")).to_contain_text("The power went")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_sideways_scrolling(
    site: Site, visit: Visit, scheme: Any
) -> None:
    run = site.external("a name that is longer than any phone is wide, and then some more of it")
    site.log(run, 1, 20)
    site.send_log(run, 0, 1, "x" * 500)
    phone: dict[str, Any] = {
        "viewport": {"width": 390, "height": 844},
        "has_touch": True,
        "color_scheme": scheme,
    }
    page = visit(f"/runs/{run}/", **phone)
    for address in (
        "/",
        f"/runs/{run}/",
        *(f"/runs/{run}/?tab={tab}" for tab in ("logs", "config", "history", "performance")),
        "/gallery/",
    ):
        page.goto(address)
        wide = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, f"{address} is {wide} px too wide"
        dark = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 60"
        )
        assert dark is (scheme == "dark"), address
    names = ("loss", "val_loss", "tokens_per_s", "mfu", "grad_norm", "step_time_s")
    site.log(run, 21, 1, **dict.fromkeys(names, 0.5), **{"memory/allocated_bytes": 1e9})
    page.goto(f"/runs/{run}/")
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    until_step(page, 21)
    expect(page.locator("#tiles .tile")).to_have_count(7)
    top = "document.querySelector('[data-panel=\"loss\"] .chart-plot').getBoundingClientRect().top"
    assert page.evaluate(f"{top} + scrollY") < 844, "the first chart is below the fold"


def test_the_theme_can_be_chosen_and_stays(site: Site, visit: Visit) -> None:
    page = visit("/", color_scheme="light")
    page.locator('summary[aria-label="Account and more"]').click()
    page.get_by_role("button", name="dark", exact=True).click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"


def test_by_keys_alone(site: Site, visit: Visit) -> None:
    run = site.external("found by its name")
    site.log(run, 1, 10)
    page = visit("/")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Escape")
    jump(page, "g", "r", "**/runs/")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"/runs/{run}/$"))
    until_step(page, 10)
    page.locator(".tabs a").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"\?tab="))
    page.go_back()
    until_step(page, 10)
    wait_until(page, """document.querySelector('[data-panel="loss"] .chart-plot').data""")
    page.locator('[data-panel="loss"] .chart-plot').focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator('[data-panel="loss"] .chart-summary')).to_contain_text(
        "step 9: training 4.237 nats/token"
    )
