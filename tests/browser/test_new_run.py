"""New-run form in Chromium: synced fields and JSON, errors, submit, no scripts, keys, phones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from orchestrator.runs.models import Run
from tests import factories
from tests.browser.logged_in_page import opened
from tests.webui.test_fleet import hold
from tests.webui.test_new_run import SPECS
from webui.forms.form_sections import field_table
from webui.forms.spec_fields import FIELDS
from webui.forms.spec_form import parse, spec_of, values_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("database_from_here"),
]

ADDRESSES = (
    *(
        "/runs/",
        "/runs/new/",
        "/fleet/",
        "/fleet/orion/",
        "/queue/",
        "/experiments/",
        "/experiments/new/",
    ),
    *("/account/", "/account/tokens/", "/account/audit/"),
)


def spec_in(page: Page) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(page.locator("#spec-json").input_value())
    return result


def test_browser_and_server_read_fields_alike(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, "/runs/new/") as page:
        changes: list[dict[str, str]] = [
            {},
            {"kind": "script", "script.command": "a.py 'b c' --d=\"e f\""},
            {"kind": "external"},
            {"plan": "auto"},
            {
                "train.steps": "1e3",
                "train.optimizer.lr": "3e-4",
                "train.optimizer.betas": "0.9,0.95",
                "tags": "a,, b ",
            },
            {
                "train.eval.every_steps": "",
                "train.clip_norm": "",
                "plan.zero": "3",
                "train.compile": "on",
            },
            {"model": "custom", "model.custom": '{"layers": 1'},
            {"data.preset": "file", "data.path": " x.jsonl "},
            {"data.preset": "dataset:chats@3", "data.format": "jsonl"},
            {"script.env": "A = 1\nB\n\nC=x=y", "kind": "script"},
            {
                "kind": "produce",
                "produce.tasks": "math:2, open_qa , code:x",
                "produce.filters": "length max_chars=9 \n\nregex 'pattern=a b' n=x",
            },
            {"kind": "produce", "produce.tasks": "math: 2", "produce.filters": "regex 'open"},
            {"plan.micro_batch_size": "-1", "notes": "é\nß"},
        ]
        cases = [(spec, values_of(spec) | change) for spec in SPECS.values() for change in changes]
        result = page.evaluate(
            """async ([cases, table]) => {
                const form = await import("/static/webui/js/spec_form.js");
                return cases.map(([spec, values]) => [
                    form.specOf(values, spec, table), form.valuesOf(spec, table)]);
            }""",
            [cases, json.loads(json.dumps(field_table()))],
        )
        for (spec, values), (converted, shown) in zip(cases, result, strict=True):
            assert converted == json.loads(json.dumps(spec_of(values, spec))), values
            ours = values_of(spec)
            for field in FIELDS:  # 1e-06 and 0.000001 are one number
                assert (
                    parse(field, shown[field.path] or "") == parse(field, ours.get(field.path, ""))
                    or field.kind == "json"
                )


def test_fields_and_json_stay_in_step_and_submit_a_run(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, "/runs/new/") as page:
        expect(page.locator("#verdict")).to_contain_text("Ready to submit")
        page.fill("[name=name]", "from a browser")
        page.fill('[name="plan.dp"]', "2")
        assert spec_in(page)["plan"]["dp"] == 2
        expect(page.locator("#verdict")).to_contain_text("do not divide")  # 8 sequences by 8 x 2
        error = page.locator('[data-field="plan.global_batch_size"] .error')
        expect(error).to_have_text(re.compile("8 sequences do not divide"))
        expect(page.locator('[name="plan.global_batch_size"]')).to_have_attribute(
            "aria-invalid", "true"
        )
        page.fill('[name="plan.global_batch_size"]', "32")
        expect(error).to_have_count(0)
        expect(page.locator("#verdict")).to_contain_text("32 sequences × 128 = 4,096 tokens")
        spec = spec_in(page)
        spec["train"]["steps"] = 77
        spec["train"]["optimizer"]["eps"] = 1e-6  # which no field shows
        page.fill("#spec-json", json.dumps(spec))
        expect(page.locator('[name="train.steps"]')).to_have_value("77")
        page.fill('[name="train.seed"]', "5")
        assert spec_in(page)["train"]["optimizer"]["eps"] == 1e-6
        page.fill("#spec-json", json.dumps(spec_in(page))[:-1])
        expect(page.locator("#json-error")).to_contain_text("Invalid JSON")
        page.fill("#spec-json", json.dumps(spec | {"train": spec["train"] | {"seed": 5}}))
        expect(page.locator("#json-error")).to_be_hidden()
        page.get_by_text("As curl command").click()
        expect(page.locator("#curl-text")).to_contain_text("Bearer $ORRERY_TOKEN")
        page.get_by_role("button", name="Submit run").click()
        page.wait_for_url(re.compile(r"/runs/\d+/$"))
        run = Run.objects.get()
        assert run.name == "from a browser" and run.devices == 2
        assert (
            run.spec["train"]["steps"],
            run.spec["train"]["seed"],
            run.spec["train"]["optimizer"]["eps"],
        ) == (
            77,
            5,
            1e-6,
        )


def test_a_kind_shows_its_own_fields_and_forgets_nothing(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, "/runs/new/") as page:
        page.fill('[name="train.steps"]', "321")
        page.select_option("[name=kind]", "script")
        expect(page.locator('[data-section="train"]')).to_be_hidden()
        page.fill('[name="script.command"]', "train.py --lr 3e-4")
        assert spec_in(page) == {
            "kind": "script",
            "script": {"command": ["train.py", "--lr", "3e-4"]},
        }
        page.select_option("[name=kind]", "external")
        expect(page.locator("#recorder-lines")).to_contain_text(
            f'orrery_recorder.init("{live_server.url}"'
        )
        assert spec_in(page) == {"kind": "external"}
        page.select_option("[name=kind]", "train")
        assert spec_in(page)["train"]["steps"] == 321
        page.select_option("[name=plan]", "auto")
        expect(page.locator('[name="plan.dp"]')).to_be_hidden()
        assert spec_in(page)["plan"] == "auto"


def test_without_scripts_the_form_still_works(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    with opened(browser, live_server, "/runs/new/", java_script_enabled=False) as page:
        page.fill("[name=name]", "plain")
        page.fill('[name="train.seq_len"]', "abc")
        page.get_by_role("button", name="Submit run").click()
        expect(page.locator('[data-field="train.seq_len"] .error')).to_contain_text(
            "'abc' is refused"
        )
        expect(page.locator("[name=name]")).to_have_value("plain")
        page.fill('[name="train.seq_len"]', "64")
        page.get_by_role("button", name="Submit run").click()
        page.wait_for_url(re.compile(r"/runs/\d+/$"))
        assert Run.objects.get().spec["train"]["seq_len"] == 64


def test_by_keys_alone_from_the_list_to_a_submitted_run(
    browser: Browser, live_server: Any, owner: Any
) -> None:
    older = factories.run(owner, name="older")
    with opened(browser, live_server, "/runs/") as page:
        page.keyboard.press("ArrowDown")
        expect(page.locator("tr[data-run]")).to_be_focused()
        page.keyboard.press("x")
        expect(page.locator("#bulk-count")).to_have_text("1 selected")
        page.keyboard.press("x")
        expect(page.locator("#bulk-bar")).to_be_hidden()
        page.keyboard.press("n")
        page.wait_for_url("**/runs/new/")
        for _ in range(40):  # past the top bar to the form's first field
            if page.evaluate("document.activeElement.name") == "name":
                break
            page.keyboard.press("Tab")
        page.keyboard.type("typed")
        page.keyboard.press("Control+Enter")
        page.wait_for_url(re.compile(r"/runs/\d+/$"))
        assert Run.objects.exclude(pk=older.pk).get().name == "typed"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(
    browser: Browser, live_server: Any, owner: Any, scheme: Any
) -> None:
    hold(
        factories.run(owner, name="a run with a rather long name " * 3, tags=["tag"]),
        factories.node("orion"),
    )
    factories.run(owner, devices=8)
    with opened(
        browser, live_server, "/runs/", viewport={"width": 390, "height": 844}, color_scheme=scheme
    ) as page:
        for address in ADDRESSES:
            page.goto(address)
            wide = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{address} is {wide} px too wide"
            dark = page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 60"
            )
            assert dark is (scheme == "dark"), address
            assert (
                page.locator("main h1").count() == 1
                and page.locator("main .sentence").first.is_visible()
            )
