"""Requests of pages, in node: an expired login and a slow answer look the same on every page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import webui

SCRIPTS = Path(webui.__file__).parent / "static" / "webui" / "js"
TEXT = "Your login has expired. Reload the page."

_BROWSER = """
const element = () => ({
  children: [],
  setAttribute() {},
  remove() { parts.delete(this.id); },
  append(...more) {
    this.children.push(...more);
    for (const one of more) if (one.id) parts.set(one.id, one);
  },
});
const parts = new Map([["toasts", element()], ["slow", element()]]);
parts.get("slow").hidden = true;
globalThis.window = globalThis;
globalThis.location = { href: "http://orrery.test/runs/", reload() {} };
globalThis.document = { getElementById: (id) => parts.get(id) ?? null, createElement: element };
"""


def in_node(program: str) -> Any:
    """What the program prints as JSON."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    text = (
        f"{_BROWSER}\nconst page = await import({json.dumps((SCRIPTS / 'request.js').as_uri())});"
    )
    done = subprocess.run(
        [node, "--input-type=module", "-e", text + program],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_every_script_sends_its_requests_in_one_way() -> None:
    """Only Compare noticed an expired login; other pages showed the login page or nothing."""
    senders = {
        path.name
        for path in SCRIPTS.rglob("*.js")
        if re.search(r"(?<![\w.`])fetch\(", path.read_text())
    }
    assert senders == {"request.js"}


@pytest.mark.parametrize(
    "answer",
    [
        '{ ok: true, status: 200, redirected: true, url: "http://orrery.test/login/?next=/" }',
        '{ ok: false, status: 401, redirected: false, url: "http://orrery.test/api/v1/runs" }',
    ],
)
def test_an_expired_login_is_an_error_with_a_notice(answer: str) -> None:
    program = f"""
    globalThis.fetch = async () => ({answer});
    await page.request("/x");
    const result = await page.request("/x"), body = await result.json();
    const notices = parts.get("toasts").children.length;
    globalThis.fetch = async () => ({{ ok: true, status: 200, redirected: false, url: "" }});
    await page.request("/x");
    const left = parts.has("login-expired"), {{ ok, status }} = result;
    console.log(JSON.stringify({{ ok, status, body, notices, left }}));
    """
    body = {"detail": TEXT, "error": {"message": TEXT}}
    expected = {"ok": False, "status": 401, "body": body, "notices": 1, "left": False}
    assert in_node(program) == expected


def test_other_answers_pass_unchanged() -> None:
    program = """
    const answers = [[200, false], [404, false], [200, true]].map(([status, redirected]) =>
      ({ ok: status === 200, status, redirected, url: "http://orrery.test/runs/7/" }));
    const same = [];
    for (const answer of answers) {
      globalThis.fetch = async () => answer;
      same.push(await page.request("/x") === answer);
    }
    console.log(JSON.stringify({ same, notices: parts.get("toasts").children.length }));
    """
    assert in_node(program) == {"same": [True, True, True], "notices": 0}


def test_a_slow_answer_is_announced_until_it_arrives() -> None:
    program = """
    const timers = [];
    globalThis.setTimeout = (run) => timers.push(run);
    globalThis.clearTimeout = () => {};
    let answer, fail;
    globalThis.fetch = () => new Promise((done, refuse) => { answer = done; fail = refuse; });
    const slow = parts.get("slow"), seen = [slow.hidden];
    const first = page.request("/x");
    seen.push(slow.hidden);
    timers[0]();
    seen.push(slow.hidden);
    answer({ ok: true, status: 200, redirected: false, url: "" });
    await first;
    seen.push(slow.hidden);
    const second = page.request("/x").catch(() => null);
    timers[1]();
    seen.push(slow.hidden);
    fail(new Error("no network"));
    await second;
    seen.push(slow.hidden);
    console.log(JSON.stringify(seen));
    """
    assert in_node(program) == [True, True, False, True, False, True]


def test_a_call_of_a_model_is_never_announced_as_slow() -> None:
    program = """
    let timers = 0, sent;
    globalThis.setTimeout = () => { timers += 1; };
    globalThis.fetch = async (url, options) => {
      sent = options;
      return { ok: true, status: 200, redirected: false, url };
    };
    await page.request("/x", { method: "POST", slowNotice: false });
    console.log(JSON.stringify({ timers, sent }));
    """
    assert in_node(program) == {"timers": 0, "sent": {"method": "POST"}}


def test_the_scripts_that_call_models_show_no_notice_while_a_model_answers() -> None:
    """They said that the numbers shown may be incomplete, and show none."""
    callers = {
        path.name
        for path in SCRIPTS.rglob("*.js")
        if path.name != "request.js" and "slowNotice: false" in path.read_text()
    }
    assert callers == {"adapters.js", "chat.js", "score.js", "side_by_side.js"}
