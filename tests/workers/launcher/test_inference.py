"""A serve run under a real supervisor, from its launch order to its exit."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.workers.launcher.harness import Node
from workers.contracts.wire.serving_reports import KEY_HEADER, serve_key
from workers.launcher.rundir import RunDir, write_json

pytestmark = pytest.mark.flow

MODEL = {
    "name": "tiny",
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "ffn": 16,
    "vocab": 64,
    "max_seq_len": 4096,
}
PROMPT: dict[str, Any] = {"prompt": [1, 2, 3], "ignore_eos": True, "stream": True}


def order(node: Node, kind: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    spec = {"kind": kind, "model": MODEL, kind: body}
    made = node.order(
        ["unused"], ranks=1, **{"grace_s": 60.0, "env": {"OMP_NUM_THREADS": "1"}, **more}
    )
    return {**made, "kind": kind, "spec": spec}


def event(node: Node, run_dir: RunDir, kind: str) -> dict[str, Any]:
    path = run_dir.rank(0) / "events.jsonl"

    def result() -> dict[str, Any] | None:
        lines = path.read_text().splitlines() if path.exists() else []
        return next((each["data"] for each in map(json.loads, lines) if each["type"] == kind), None)

    return node.until(result, 180, kind)


def answer(url: str, key: dict[str, str]) -> int | None:
    """What the server says to one more prompt; None where it is gone by now."""
    try:
        return httpx.post(url, json=PROMPT, headers=key, timeout=60).status_code
    except httpx.TransportError:
        return None


def test_a_server_starts_answers_and_exits_ok_when_stopped(node: Node) -> None:
    started = order(node, "serve", {})
    run_dir = node.launch(started)
    reported = event(node, run_dir, "serving")
    url = f"http://{reported['host']}:{reported['port']}/v1/completions"
    key = {KEY_HEADER: serve_key(started["fence"])}
    with httpx.stream(
        "POST", url, json={**PROMPT, "max_tokens": 400}, headers=key, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        write_json(run_dir.request, {"action": "cancel", "grace_s": 60.0})
        event(node, run_dir, "draining")
        assert answer(url, key) in (503, None), "it takes no more"
        assert [each for each in lines if each][-1] == "data: [DONE]", (
            "what was on its way has come to its end"
        )
    result = node.exited(started)
    assert result["class"] == "ok" and "stopped on request after 1 requests" in result["reason"], (
        result
    )
    assert {"serving", "draining", "served"} <= {
        each["type"]
        for batch in node.batches
        if batch["stream"] == "events"
        for each in batch["events"]
    }
    assert node.seqs("points", 0)
