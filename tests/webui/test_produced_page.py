"""The page and REST calls of a produce run: funnel, lines with provenance, files elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runs import services
from orchestrator.runs.outputs import produced_lines
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.webui.pages import compact
from webui.presentation import event_messages
from webui.tabs.produced import row
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db
BODY: dict[str, Any] = {
    "tasks": ["math"],
    "count": 50,
    "method": "best_of_n",
    "seeds": "seeds.jsonl",
    "filters": [{"kind": "length"}, {"kind": "rouge_l"}],
    "server": {"url": "http://127.0.0.1:1/v1", "model": "tiny"},
}
VALUES = {
    "produce/accepted": 30.0,
    "produce/rejected": 10.0,
    "produce/candidates": 160.0,
    "produce/filtered/rouge_l": 40.0,
    "produce/filtered/length": 20.0,
    "produce/prompt_tokens": 9000.0,
    "produce/completion_tokens": 3000.0,
    "produce/tokens_per_s": 60.0,
    "produce/lines_per_s": 0.5,
    "produce/cost_usd": 0.06,
}


def line(number: int, **origin: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": f"What is <{number}>?"},
        {"role": "assistant", "content": f"It is {number}."},
    ]
    origin = {"unit": number, "seed_line": 3, "seed_prompt": "the seed", "server": "u", **origin}
    return {"messages": turns, "task_type": "math", "provenance": origin}


def write(path: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines) + tail)


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path})
    return tmp_path


@pytest.fixture
def run(people: factories.People, data_root: Path) -> Any:
    (data_root / "seeds.jsonl").write_text('{"prompt": "x"}\n')
    return factories.run(people.owner, kind="produce", train=None, plan={}, produce=BODY)


def test_lines_are_listed_newest_first_and_the_funnel_counts(
    people: factories.People, run: Any, home: Path
) -> None:
    attempt = factories.running(run, factories.node("n1"))
    client, rest = factories.client_for(people.teammate), factories.api(people.teammate)
    address = f"/api/v1/runs/{run.pk}"
    empty = client.get(f"/runs/{run.pk}/").content.decode()
    assert "No candidates yet" in empty and "No lines yet" in empty
    assert rest.get(f"{address}/lines").status_code == 409
    batch = PointBatch(
        run=str(run.pk),
        attempt=attempt.number,
        rank=0,
        seq=[1],
        step=[40],
        tokens=[12000],
        time=[1.0],
        values={name: [value] for name, value in VALUES.items()},
    )
    telemetry.points_store(run=run, attempt=attempt.number, batches=[batch])
    folder = home / "runs" / str(run.pk)
    # lines that are longer than a chunk, and one that is being written
    long = {"padding": "x" * (produced_lines._CHUNK // 3)}
    write(folder / "produced.jsonl", [line(n, **long) for n in range(23)], tail='{"mess')
    rejection = {"rejected_by": "rouge_l", "detail": "ROUGE-L 0.91 with unit 4, at most 0.7"}
    write(folder / "produced.rejected.jsonl", [line(99, scores={"rouge_l": 0.91}, **rejection)])

    progress = rest.get(f"{address}/produced").json()
    assert progress["stages"] == [
        {"kind": "length", "rejected": 20, "left": 140},
        {"kind": "rouge_l", "rejected": 40, "left": 100},
        {"kind": "judge", "rejected": 0, "left": 100},
    ]
    assert progress["wanted"] == 50 and progress["eta_s"] == pytest.approx(20 / (0.5 * 0.75))
    listed, cursor = list[int](), None
    while True:
        query = {"limit": "10", **({"cursor": cursor} if cursor else {})}
        page = rest.get(f"{address}/lines", query).json()
        listed += [item["content"]["provenance"]["unit"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert listed == list(range(22, -1, -1))
    assert rest.get(f"{address}/lines", {"cursor": "x"}).status_code == 422
    assert b"".join(rest.get(f"{address}/lines/download")).count(b"\n") == 23  # type: ignore[arg-type]

    shown = compact(client.get(f"/runs/{run.pk}/").content.decode())
    assert "30 of 50 lines accepted, 10 rejected, 0.500 lines/s" in shown, shown.split("sentence")[
        1
    ][:200]
    assert "What is &lt;22&gt;?" in shown and "the seed" in shown and "Older lines" in shown
    assert (
        "too similar (ROUGE-L)" in shown
        and "−40" in shown
        and "Cost per line" in shown
        and "0.002" in shown
    )
    rejected = compact(client.get(f"/runs/{run.pk}/?lines=rejected").content.decode())
    assert "ROUGE-L 0.91 with unit 4, at most 0.7" in rejected and "Older lines" not in rejected
    summary = client.get(f"/runs/{run.pk}/?tab=summary").content.decode()
    assert "Rejected by filter" in summary and "Lines per second" in summary


def test_other_runs_have_no_lines(people: factories.People) -> None:
    run = factories.run(people.owner)
    rest = factories.api(people.owner)
    for path in ("produced", "lines", "lines/download"):
        answer = rest.get(f"/api/v1/runs/{run.pk}/{path}")
        assert answer.status_code == 422 and "is a train run" in answer.json()["detail"]


def test_pairs_and_events_are_described(run: Any) -> None:
    content = {
        "prompt": [{"role": "user", "content": "2+2"}],
        "chosen": [{"role": "assistant", "content": "4"}],
        "rejected": [{"role": "assistant", "content": "5"}],
        "task_type": "math",
        "provenance": {
            "unit": 1,
            "score": 9.0,
            "scored_by": "judge",
            "candidate_scores": [9.0, None],
            "steps": [{"operation": "deepen", "instruction": "harder"}],
        },
    }
    shown = row(content)
    assert [text["role"] for text in shown["texts"]] == ["user", "chosen", "rejected"]
    assert shown["scores"] == [("judge", "9")] and shown["steps"] == [("deepen", "harder")]
    assert row({})["texts"] == [], "a line of another program"

    def text(type_: str, **data: Any) -> str:
        event = services.event_record(run=run, type=type_, data=data)
        assert event is not None
        return event_messages.event_message(event).text

    assert text("produced", accepted=3, rejected={"length": 2}) == (
        "Produced 3 lines; rejected: length 2"
    )
    assert text("server_lost", message="no answer") == "The server was lost: no answer"
