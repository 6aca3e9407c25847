"""Inference flows: a served model through OpenAI's client; a generate run whose rank is killed."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import openai
import psutil
import pytest

from tests.flows.embedded import TINY, Orrery, words_of
from tests.flows.gate import submitted

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]

LINES = 112


def rank_of(orrery: Orrery, run: str) -> psutil.Process | None:
    """The process that answers, below the keepers and torchrun."""
    for process in orrery.processes():
        words = words_of(process)
        if words[1:4] == ["-u", "-m", "workers.inference.main"] and f"/runs/{run}/" in " ".join(
            words
        ):
            return process
    return None


def test_a_model_is_served_while_a_killed_generate_run_completes(
    orrery: Orrery,
) -> None:
    assert orrery.client is not None
    model = {**TINY, "max_seq_len": 256}
    served = orrery.submit(
        {"kind": "serve", "model": model, "serve": {"kv_blocks": 64, "max_seqs": 4}}
    )
    request = [{"id": f"q{i}", "token_ids": [i % 200 + 1, 7, 9]} for i in range(LINES)]
    (orrery.home / "data").mkdir(exist_ok=True)
    (orrery.home / "data" / "in.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in request)
    )
    body = {
        "input": "in.jsonl",
        "output": "out.jsonl",
        "max_new_tokens": 120,
        "temperature": 0.8,
        "ignore_eos": True,
    }
    with submitted(orrery, {"kind": "generate", "model": model, "generate": body}) as (
        generated,
        gate,
    ):
        out = orrery.home / "runs" / generated / "out.jsonl"
        gate.until(
            lambda: out.exists() and out.read_bytes().count(b"\n") >= 8, "some lines are answered"
        )
        rank = rank_of(orrery, generated)
        assert rank is not None
        stored = out.read_bytes()  # it waits before its next step
        assert stored.count(b"\n") < LINES, "it had answered everything before it was killed"
        os.kill(rank.pid, signal.SIGKILL)

    token = orrery.client.headers["Authorization"].removeprefix("Bearer ")
    client = openai.OpenAI(
        base_url=f"{orrery.url}/serve/{served}/v1", api_key=token, max_retries=0, timeout=180
    )
    name = orrery.until(lambda: _models(client), 240, "the model is served")[0]
    prompt: Any = [1, 2, 3, 4]
    whole = client.completions.create(model=name, prompt=prompt, max_tokens=12, temperature=0)
    assert whole.usage is not None and (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    ) == (4, 12)
    pieces = list(
        client.completions.create(
            model=name, prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
    )
    assert pieces[-1].choices[0].finish_reason == "length"

    def idle() -> bool:
        result = orrery.get(f"runs/{served}/requests")
        state = result["state"] if result["phase"] == "serving" else None
        return state is not None and state["ended"] >= 2 and state["used"] == 0

    orrery.until(idle, 60, "both requests have ended and hold no block")
    assert orrery.client.post(f"runs/{served}/cancel").status_code == 200
    assert orrery.until_state(served, "finished", "failed", "cancelled") == "finished"
    summary = orrery.until(
        lambda: orrery.get(f"runs/{served}/requests")["summary"], 60, "the summary is reported"
    )
    assert summary["requests"] >= 2 and summary["finishes"]["length"] >= 2
    with pytest.raises(openai.ConflictError, match="no longer serves"):
        client.models.list()

    assert orrery.until_state(generated, "finished", "failed") == "finished"
    assert len(orrery.get(f"runs/{generated}/attempts")["items"]) == 2
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [line["id"] for line in request]
    # nothing that was answered is answered again
    assert out.read_bytes().startswith(stored[: stored.rfind(b"\n") + 1])
    page = orrery.get(f"runs/{generated}/answers", limit=2)["items"]
    assert page[1]["prompt"] == request[1]["token_ids"] and len(page[1]["token_ids"]) == 120


def _models(client: openai.OpenAI) -> list[str]:
    try:
        return [model.id for model in client.models.list()]
    except openai.APIStatusError as error:
        assert error.status_code == 503 and error.code == "run_not_ready", error
        return []
