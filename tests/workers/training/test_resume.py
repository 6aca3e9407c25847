"""Exact resume under the same or another plan; damaged and foreign checkpoints are refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.workers.training.conftest import make_spec
from workers.contracts.specs.training_rules.elastic import plan_at, spec_at
from workers.models.convert import convert
from workers.models.weights import manifest as manifests
from workers.models.weights.manifest import find_damage, write_manifest

HALF_STEPS, FULL_STEPS = 3, 6


def spec(plan, steps, **more):
    schedule = {"name": "linear", "min_lr": 1e-4}
    document = make_spec(
        None,
        {"global_batch_size": 8, "micro_batch_size": 2, **plan},
        steps=steps,
        clip_norm=1.0,
        **more,
    )
    document["train"]["lr_schedule"] = schedule | {"name": "constant", "min_lr": 0.0}
    return document


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory):
    return train(spec({}, FULL_STEPS), tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture(scope="module")
def first_step(train, tmp_path_factory):
    """The directory of a run that saved a checkpoint after its first step; tests copy it."""
    directory = tmp_path_factory.mktemp("first_step")
    train(spec({}, 1, checkpoint={"every_steps": 1}), directory)
    return directory


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"dp": 2, "zero": 3}, {"dp": 2, "zero": 3}),
        ({"dp": 4, "zero": 1}, {"dp": 2, "zero": 2}),
        ({"dp": 2, "zero": 0}, {"dp": 4, "zero": 3, "dp_replicate": 2}),
    ],
    ids=str,
)
def test_resumes_exactly(before, after, uninterrupted, train, tmp_path):
    checkpoint = {"every_steps": HALF_STEPS, "async": before.get("zero") != 1}
    first = train(spec(before, HALF_STEPS, checkpoint=checkpoint), tmp_path)
    saved = [event for event in first.events() if event["type"] == "checkpoint_saved"]
    assert [event["data"]["step"] for event in saved] == [HALF_STEPS]
    second = train(spec(after, FULL_STEPS, checkpoint=checkpoint), tmp_path)
    points = [point for point in second.points() if point["attempt"] == 2]
    assert [point["seq"] for point in points] == list(range(1, FULL_STEPS - HALF_STEPS + 1))
    assert [point["step"] for point in points] == list(range(HALF_STEPS + 1, FULL_STEPS + 1))
    assert points[-1]["tokens"] == uninterrupted.points()[-1]["tokens"]
    assert "checkpoint_restored" in [event["type"] for event in second.events()]
    losses = [point["values"]["loss"] for point in points]
    exact = before == after == {}
    assert losses == (
        uninterrupted.values("loss")[HALF_STEPS:]
        if exact
        else pytest.approx(uninterrupted.values("loss")[HALF_STEPS:], rel=1e-5)
    )


def test_the_curve_is_the_same_on_4_then_2_then_4_ranks(uninterrupted, train, tmp_path):
    plan = {"dp": 4, "zero": 1, "global_batch_size": 8, "micro_batch_size": 2}
    losses = []
    for number, (ranks, last) in enumerate(((4, 2), (2, 4), (4, FULL_STEPS)), start=1):
        checkpoint = {"every_steps": 2, "async": False}
        elastic = spec(plan, last, checkpoint=checkpoint, accumulate=1)
        elastic["resources"] = {"min_devices": 2}
        result = train(spec_at(elastic, plan_at(elastic["plan"], ranks), ranks), tmp_path)
        points = [point for point in result.points() if point["attempt"] == number]
        losses += [point["values"]["loss"] for point in points]
    assert losses == pytest.approx(uninterrupted.values("loss"), abs=1e-5, rel=0)


def test_resumes_from_the_newest_complete_checkpoint_and_deletes_old_ones(train, tmp_path):
    train(spec({}, 8, checkpoint={"every_steps": 2, "keep": 2}), tmp_path)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-00000006", "step-00000008"]
    shard = next((tmp_path / "checkpoints" / "step-00000008").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    (tmp_path / "checkpoints" / ".step-00000009.attempt-1").mkdir()
    result = train(spec({}, 9), tmp_path)
    events = {event["type"]: event["data"] for event in result.events() if event["attempt"] == 2}
    assert "checksum" in events["checkpoint_rejected"]["message"]
    assert events["checkpoint_restored"]["step"] == 6


def test_starts_from_scratch_if_no_checkpoint_is_complete(train, tmp_path):
    train(spec({}, 4, checkpoint={"every_steps": 2, "keep": 2}), tmp_path)
    older, newer = sorted((tmp_path / "checkpoints").iterdir())
    next(older.glob("*.distcp")).unlink()
    (newer / "manifest.json").write_text('{"version": 1, "fi')
    result = train(spec({}, 5), tmp_path)
    events = [event for event in result.events() if event["attempt"] == 2]
    messages = [
        event["data"]["message"] for event in events if event["type"] == "checkpoint_rejected"
    ]
    assert len(messages) == 2
    assert "manifest.json cannot be read" in messages[0] and "is missing" in messages[1]
    assert [point["step"] for point in result.points() if point["attempt"] == 2] == [1, 2, 3, 4, 5]


def test_resumes_from_a_named_checkpoint_of_another_directory(train, uninterrupted, tmp_path):
    train(spec({}, HALF_STEPS, checkpoint={"every_steps": HALF_STEPS}), tmp_path / "first")
    folder = tmp_path / "first" / "checkpoints" / "step-00000003"
    result = train(
        spec({}, FULL_STEPS), tmp_path / "second", ORRERY_RESUME=str(folder), ORRERY_ATTEMPT="7"
    )
    assert result.values("loss") == uninterrupted.values("loss")[HALF_STEPS:]
    assert {point["attempt"] for point in result.points()} == {7}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["samples"], manifest["tokens"]) == (3, 24, 384)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["train"].update(seed=4), "rng.seed 3, the spec has 4"),
        (lambda s: s["model"].update(hidden=64), "model.hidden 32, the spec has 64"),
        (lambda s: s["train"].update(seq_len=8), "seq_len 16, the spec has 8"),
    ],
)
def test_checkpoint_of_another_run_is_refused(change, message, first_step, train, tmp_path):
    shutil.copytree(first_step, tmp_path, dirs_exist_ok=True)
    other = json.loads(json.dumps(spec({}, 2)))
    change(other)
    outcome = train(other, tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert message in outcome["reason"]


def text_run(path, steps, **train):
    document = spec({}, steps, checkpoint={"every_steps": 1}, **train)
    return {**document, "data": {"path": str(path), "format": "text"}}


def test_other_data_are_refused_or_continued_on_request(train, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    directory = tmp_path / "run"
    assert train(text_run(text, 1), directory).outcomes[0]["class"] == "ok"
    moved = text.rename(tmp_path / "moved.txt")
    assert train(text_run(moved, 2), directory).outcomes[0]["class"] == "ok"
    moved.write_text("pack my box with five dozen liquor jugs then go\n" * 200)
    outcome = train(text_run(moved, 3), directory).outcomes[0]
    assert outcome["class"] == "user_error"
    assert "was trained on other data" in outcome["reason"]
    assert "train.allow_data_change true" in outcome["reason"]
    result = train(text_run(moved, 3, allow_data_change=True), directory)
    assert result.outcomes[0] == {"class": "ok", "reason": "all 3 steps done", "step": 3}
    [event] = [each for each in result.events() if each["type"] == "data_changed"]
    assert event["data"]["step"] == 2
    assert train(text_run(moved, 4), directory).outcomes[0]["class"] == "ok"


def test_each_rank_hashes_its_own_file(train, tmp_path, monkeypatch):
    checkpoint = {"every_steps": 1, "async": True}
    train(spec({"dp": 2, "zero": 1}, 1, checkpoint=checkpoint), tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    shards = sorted(name for name in manifest["files"] if name.endswith(".distcp"))
    assert len(shards) == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*manifest["files"], "manifest.json"]
    )
    assert find_damage(folder, manifest) is None
    hashed = []
    monkeypatch.setattr(manifests, "file_digest", lambda path: hashed.append(path.name) or "new")
    write_manifest(folder, {"step": 1}, digests=dict.fromkeys(shards, "known"))
    assert hashed == sorted(manifest["files"].keys() - set(shards))


def test_a_checkpoint_without_a_fingerprint_is_continued(first_step, train, tmp_path):
    """Checkpoints of earlier versions have none."""
    shutil.copytree(first_step, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest.pop("data_fingerprint")) == 64
    write_manifest(folder, {k: manifest[k] for k in manifest.keys() - {"files", "version"}})
    assert train(spec({}, 2), tmp_path).outcomes[0]["class"] == "ok"


def test_resume_from_a_missing_folder_is_refused(train, tmp_path):
    outcome = train(spec({}, 2), tmp_path, ORRERY_RESUME=str(tmp_path / "nothing")).outcomes[0]
    assert outcome["class"] == "user_error"
    assert "manifest.json" in outcome["reason"]


class CreatesFolderOnUnpickling:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def convert_to_weights_only(folder, manifest):
    convert(folder, folder.with_name("converted"), "orrery")
    shutil.rmtree(folder)
    folder.with_name("converted").rename(folder)


def write_table_that_runs_code(folder, manifest):
    (folder / ".metadata").write_bytes(pickle.dumps(CreatesFolderOnUnpickling(str(folder / "ran"))))
    write_manifest(folder, manifest)


def replace_tensor_by_bytes(folder, manifest):
    """Replace a tensor by bytes, which torch would unpickle without a check."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    write_manifest(folder, manifest)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (convert_to_weights_only, "has only weights, converted from .*Use train.init_from"),
        (
            write_table_that_runs_code,
            "no table of contents does; give a checkpoint that this engine wrote",
        ),
        (replace_tensor_by_bytes, "model.norm.weight is not a tensor, but bytes"),
        (
            lambda folder, manifest: write_manifest(folder, {"step": 1}),
            "manifest.json has no tokens",
        ),
        (
            lambda folder, manifest: (folder / "manifest.json").write_text("[]"),
            "manifest.json is not a JSON object",
        ),
    ],
)
def test_a_foreign_checkpoint_is_refused_on_every_rank_and_runs_no_code(
    damage, message, first_step, train, tmp_path
):
    shutil.copytree(first_step, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    damage(folder, {name: manifest[name] for name in manifest.keys() - {"files", "version"}})
    plan = {"dp": 2, "zero": 1}
    outcomes = train(spec(plan, 2), tmp_path / "other", ORRERY_RESUME=str(folder)).outcomes
    assert [outcome["class"] for outcome in outcomes] == ["user_error"] * 2
    assert all(re.search(message, outcome["reason"]) for outcome in outcomes), outcomes
    assert not (folder / "ran").exists()
