"""The planner in a real Chromium: sliders, rows, formulas, comparing, keys alone, a phone, no
scripts.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.logged_in_page import jump, opened
from tests.browser.polling import wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]

START = (
    "/planner/?model=llama3-8b&device=h100-80g&nodes=1&devices_per_node=8&seq_len=4096"
    "&global_batch_size=64&tokens=10G"
)
PAGES = (
    "/planner/",
    "/planner/?model=llama3-405b&device=l40s-48g&offload=none",
    "/planner/?model=own&shape=%7B",
    "/planner/?model=llama3-70b&nodes=4&pp=4&zero=1",
    "/planner/serving/",
    "/planner/scaling/",
    "/planner/examples/",
    "/planner/saved/",
)


def state(page: Page) -> dict[str, list[str]]:
    """What the address holds now; `page.url` follows a moment later.

    Without scripts it is all there is.
    """
    return parse_qs(urlsplit(page.evaluate("location.href")).query)


def first_key(page: Page) -> str:
    return page.locator(".plans tr[data-key-of]").first.get_attribute("data-key-of") or ""


def test_a_slider_answers_and_the_address_follows(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, START) as page:
        before = page.locator("#headline").inner_text()
        slider = page.get_by_role("slider", name="Nodes, slider")
        slider.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator('[name="nodes"]')).to_have_value("2")
        expect(page.locator(".plans tbody tr").first).to_contain_text(
            re.compile(r"dp16|dp8|tp2|cp2")
        )
        expect(page.locator("#headline")).not_to_have_text(before)
        expect(slider).to_be_focused()
        expect(slider).to_have_attribute("aria-valuetext", "2")
        wait_until(page, "new URLSearchParams(location.search).get('nodes') === '2'")
        # many moves in a row end in the last one's answer
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        wait_until(page, "new URLSearchParams(location.search).get('nodes') === '16'")
        after = page.locator("#headline").inner_text()
        page.reload()
        expect(page.locator("#headline")).to_have_text(after)
        expect(page.locator('[name="nodes"]')).to_have_value("16")


def test_a_row_fills_the_charts_and_runs_as_a_form(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, START) as page:
        row = page.locator(".plans tr[data-key-of]").nth(6)
        key = row.get_attribute("data-key-of")
        tile = page.locator("#answer a.tile").first.inner_text()
        row.locator("td").nth(2).click()
        expect(page.locator("tr.selected")).to_have_attribute("data-key-of", key or "")
        expect(page.locator("#answer a.tile").first).not_to_have_text(tile)
        assert state(page)["plan"] == [key]
        expect(page.locator(".point.chosen")).to_have_attribute("data-plan", key or "")
        page.locator(".point.pareto").last.click()
        expect(page.locator("tr.selected, .point.chosen").first).to_be_visible()
        wait_until(
            page, "(key) => new URLSearchParams(location.search).get('plan') !== key", arg=key
        )
        copied = json.loads(page.locator("#plan-json").text_content() or "")
        page.get_by_role("button", name="Run this plan").click()
        page.wait_for_url("**/runs/new/?spec=*")
        spec = json.loads(page.locator("#spec-json").input_value())
        assert spec["model"] == "llama3-8b" and spec["train"]["seq_len"] == 4096
        for name in ("dp", "tp", "pp", "zero", "micro_batch_size", "precision"):
            assert spec["plan"].get(name, {"zero": 0}.get(name, 1)) == copied["plan"][name], name
        expect(page.locator("#forecast")).to_contain_text("80 GiB on h100-80g")


def test_formulas_open_branch_by_branch_and_have_links(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, START) as page:
        tile = page.locator("#answer a.tile").first
        tile.click()
        dialog = page.locator("#opened")
        expect(dialog).to_contain_text("step_time_s")
        assert state(page)["why"] == ["step_time_s"]
        branch = dialog.locator("details.why").first
        branch.locator("summary").first.click()
        expect(branch.locator("details.why").first).to_be_visible()  # requested when it opens
        deeper = branch.locator("details.why").first
        deeper.locator("summary").first.click()
        expect(deeper.locator(".why-list, .why-body").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(tile).to_be_focused()
        # the address changes after both
        wait_until(page, "!new URLSearchParams(location.search).has('why')")
        page.goto(f"{START}&plan={first_key(page)}&why=mfu")
        expect(page.locator("#opened")).to_contain_text("mfu =")
        page.keyboard.press("Escape")
        page.get_by_text("Export", exact=True).click()
        page.get_by_role("link", name="deepspeed").click()
        expect(page.locator("#exported")).to_contain_text("zero_optimization")


def test_two_marked_plans_are_compared(browser: Browser, live_server: Any, owner: Any) -> None:
    with opened(browser, live_server, START) as page:
        boxes = page.locator("[name=compare]")
        boxes.nth(0).check()
        boxes.nth(4).check()
        expect(page.locator("#comparison")).to_contain_text("step time")
        assert len(state(page)["compare"]) == 2
        boxes.nth(8).check()
        expect(page.locator("[name=compare]:checked")).to_have_count(2)
        expect(page.locator("#comparison")).to_be_visible()
        page.locator("#comparison").get_by_text("Clear").click()
        expect(page.locator("#comparison")).to_have_count(0)
        assert "compare" not in state(page)


def test_an_error_appears_at_its_field_and_disappears_with_a_valid_value(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, START) as page:
        page.fill('[name="seq_len"]', "8k")
        expect(page.locator('[data-errors="seq_len"]')).to_contain_text("not an integer")
        expect(page.locator('[name="seq_len"]')).to_have_attribute("aria-invalid", "true")
        page.fill('[name="seq_len"]', "2048")
        expect(page.locator('[data-errors="seq_len"]')).to_be_empty()
        expect(page.locator("#headline")).to_contain_text("is the fastest of")
        page.select_option('[name="model"]', "own")
        expect(page.locator('[name="shape"]')).to_be_visible()
        config = {
            "layers": 4,
            "hidden": 256,
            "heads": 4,
            "ffn": 688,
            "vocab": 1000,
            "max_seq_len": 4096,
        }
        page.locator("#p-file").set_input_files(
            {
                "name": "config.json",
                "mimeType": "application/json",
                "buffer": json.dumps(config).encode(),
            }
        )
        wait_until(page, "new URLSearchParams(location.search).get('shape')?.startsWith('{')")
        expect(page.locator("#headline")).to_contain_text("is the fastest of")
        assert json.loads(state(page)["shape"][0]) == config


def test_what_would_fit_is_taken_with_one_press(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, PAGES[1]) as page:
        expect(page.locator("#headline")).to_contain_text("does not fit")
        page.get_by_role("link", name="Apply").first.click()
        expect(page.locator("#headline")).to_contain_text("is the fastest of")


def test_by_keys_alone(browser: Browser, live_server: Any, owner: Any) -> None:
    with opened(browser, live_server, "/runs/") as page:
        jump(page, "g", "p", "**/planner/*")
        wait_until(page, "window.orrery?.planner")
        selected = page.locator("tr.selected")
        selected.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        wanted = page.locator(".plans tr[data-key-of]").nth(2).get_attribute("data-key-of") or ""
        page.keyboard.press("Enter")
        expect(page.locator("tr.selected")).to_have_attribute("data-key-of", wanted)
        expect(page.locator(f'tr[data-key-of="{wanted}"]')).to_be_focused()
        page.locator("#answer a.tile").nth(2).focus()
        page.keyboard.press("Enter")
        expect(page.locator("#opened")).to_contain_text("mfu")
        page.keyboard.press("Escape")
        expect(page.locator("#answer a.tile").nth(2)).to_be_focused()


def test_without_scripts_the_page_plans_all_the_same(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, START, java_script_enabled=False) as page:
        page.fill('[name="nodes"]', "2")
        page.get_by_role("button", name="Find plans").click()
        page.wait_for_url(re.compile(r"[?&]nodes=2\b"))
        expect(page.locator("#headline")).to_contain_text("is the fastest of")
        page.locator(".plans a[data-plan]").nth(3).click()
        page.wait_for_url(re.compile(r"[?&]plan=[^&]"))
        assert page.locator("tr.selected").count() == 1
        page.locator("#answer a.tile").first.click()
        expect(page.locator("h1")).to_have_text("Step time")


def test_the_small_pages_answer_while_one_types(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, "/planner/serving/") as page:
        before = page.locator("#headline").inner_text()
        page.fill('[name="prompt_len"]', "4096")
        expect(page.locator("#headline")).not_to_have_text(before)
        page.goto("/planner/scaling/")
        page.fill('[name="devices"]', "1024")
        expect(page.locator("#headline")).to_contain_text("1,024 h100-80g")
        page.locator("summary", has_text="Time").first.click()
        expect(page.locator(".number-body").nth(1)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone_and_nothing_jumps(
    browser: Browser, live_server: Any, owner: Any, scheme: Any
) -> None:
    with opened(
        browser, live_server, "/", viewport={"width": 390, "height": 844}, color_scheme=scheme
    ) as page:
        for address in PAGES:
            page.goto(address)
            wide = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{address} is {wide} px too wide"
            assert (
                page.locator("main h1").count() == 1
                and page.locator("main .sentence").first.is_visible()
            )
            moved = page.evaluate(
                """() => new Promise((done) => { let sum = 0;
                new PerformanceObserver((list) => {
                  for (const entry of list.getEntries()) sum += entry.value;
                }).observe({ type: "layout-shift", buffered: true });
                setTimeout(() => done(sum), 250); })"""
            )
            assert moved < 0.02, f"{address} moved by {moved}"


SMALL = """() => {
  const controls = "a[href], button, input:not([type=hidden]), select, textarea, summary";
  const size = (one) => {
    const {width, height} = one.getBoundingClientRect(), before = getComputedStyle(one, "::before");
    const grown = before.content === "none" ? 0 : -2 * (parseFloat(before.top) || 0);
    return [width + grown, height + grown];
  };
  return [...document.querySelectorAll(controls)].filter((one) => {
    const [width, height] = size(one), {display, visibility} = getComputedStyle(one);
    const shown = one.getClientRects().length && visibility !== "hidden";
    if (!shown || display === "inline") return false;
    return !one.closest(".visually-hidden, .skip, .treemap") && Math.min(width, height) < 24;
  }).map((one) => `${one.tagName} ${one.className} ${one.name ?? ""} ${size(one)}`);
}"""


def test_controls_are_large_enough_for_a_finger(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    """WCAG 2.2, 2.5.8: 24 px. Checkboxes of plans had 20, points of the scatter 21."""
    phone = {"width": 390, "height": 844}
    with opened(browser, live_server, "/planner/", viewport=phone) as page:
        expect(page.locator(".point.chosen")).to_be_visible()
        assert page.evaluate(SMALL) == []
