"""A resumed run goes on exactly, under its own plan or another; damaged and foreign checkpoints are
told.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.workers.training.conftest import make_spec
from workers.models.convert import convert
from workers.models.weights.manifest import write_manifest

HALF, WHOLE = 5, 10


def spec(plan, steps, **more):
    schedule = {"name": "linear", "min_lr": 1e-4}
    found = make_spec(
        None,
        {"global_batch_size": 8, "micro_batch_size": 2, **plan},
        steps=steps,
        clip_norm=1.0,
        **more,
    )
    found["train"]["lr_schedule"] = schedule | {"name": "constant", "min_lr": 0.0}
    return found


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    return train(spec({}, WHOLE), tmp_path_factory.mktemp("straight"))


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
def test_goes_on_exactly(before, after, straight, train, tmp_path):
    checkpoint = {"every_steps": HALF, "async": before.get("zero") != 1}
    first = train(spec(before, HALF, checkpoint=checkpoint), tmp_path)
    saved = [event for event in first.events() if event["type"] == "checkpoint_saved"]
    assert [event["data"]["step"] for event in saved] == [HALF]
    second = train(spec(after, WHOLE, checkpoint=checkpoint), tmp_path)
    points = [point for point in second.points() if point["attempt"] == 2]
    assert [point["seq"] for point in points] == list(range(1, WHOLE - HALF + 1))
    assert [point["step"] for point in points] == list(range(HALF + 1, WHOLE + 1))
    assert points[-1]["tokens"] == straight.points()[-1]["tokens"]
    assert "checkpoint_restored" in [event["type"] for event in second.events()]
    losses = [point["values"]["loss"] for point in points]
    exact = before == after == {}
    assert losses == (
        straight.values("loss")[HALF:]
        if exact
        else pytest.approx(straight.values("loss")[HALF:], rel=1e-5)
    )


def test_newest_whole_checkpoint_is_taken_and_old_ones_go(train, tmp_path):
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


def test_where_nothing_whole_is_left_a_run_says_so_and_begins_anew(train, straight, tmp_path):
    train(spec({}, 4, checkpoint={"every_steps": 2, "keep": 2}), tmp_path)
    older, newer = sorted((tmp_path / "checkpoints").iterdir())
    next(older.glob("*.distcp")).unlink()
    (newer / "manifest.json").write_text('{"version": 1, "fi')
    result = train(spec({}, 5), tmp_path)
    events = [event for event in result.events() if event["attempt"] == 2]
    message = [
        event["data"]["message"] for event in events if event["type"] == "checkpoint_rejected"
    ]
    assert (
        len(message) == 2
        and "manifest.json cannot be read" in message[0]
        and "is missing" in message[1]
    )
    assert [point["step"] for point in result.points() if point["attempt"] == 2] == [1, 2, 3, 4, 5]


def test_named_checkpoint_of_another_place(train, straight, tmp_path):
    train(spec({}, HALF, checkpoint={"every_steps": HALF}), tmp_path / "first")
    folder = tmp_path / "first" / "checkpoints" / "step-00000005"
    result = train(
        spec({}, WHOLE), tmp_path / "second", ORRERY_RESUME=str(folder), ORRERY_ATTEMPT="7"
    )
    assert result.values("loss") == straight.values("loss")[HALF:]
    assert {point["attempt"] for point in result.points()} == {7}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["samples"], manifest["tokens"]) == (5, 40, 640)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["train"].update(seed=4), "rng.seed 3, the spec has 4"),
        (lambda s: s["model"].update(hidden=64), "model.hidden 32, the spec has 64"),
        (lambda s: s["train"].update(seq_len=8), "seq_len 16, the spec has 8"),
    ],
)
def test_checkpoint_of_another_run_is_refused(change, message, train, tmp_path):
    train(spec({}, 1, checkpoint={"every_steps": 1}), tmp_path)
    other = json.loads(json.dumps(spec({}, 2)))
    change(other)
    outcome = train(other, tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert message in outcome["reason"]


def test_resume_from_nowhere_is_refused(train, tmp_path):
    outcome = train(spec({}, 2), tmp_path, ORRERY_RESUME=str(tmp_path / "nothing")).outcomes[0]
    assert outcome["class"] == "user_error"
    assert "manifest.json" in outcome["reason"]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def weights_alone(folder, manifest):
    convert(folder, folder.with_name("converted"), "orrery")
    shutil.rmtree(folder)
    folder.with_name("converted").rename(folder)


def table_that_runs_code(folder, manifest):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(str(folder / "ran"))))
    write_manifest(folder, manifest)


def bytes_for_a_tensor(folder, manifest):
    """Torch would unpickle them whatever they hold."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    write_manifest(folder, manifest)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (weights_alone, "has only weights, converted from .*try train.init_from"),
        (
            table_that_runs_code,
            "no table of contents does; give a checkpoint that this engine wrote",
        ),
        (bytes_for_a_tensor, "model.norm.weight is not a tensor, but bytes"),
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
def test_a_foreign_checkpoint_is_refused_on_every_rank_and_runs_nothing(
    harm, message, train, tmp_path
):
    train(spec({}, 1, checkpoint={"every_steps": 1}), tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    harm(folder, {name: manifest[name] for name in manifest.keys() - {"files", "version"}})
    plan = {"dp": 2, "zero": 1}
    outcomes = train(spec(plan, 2), tmp_path / "other", ORRERY_RESUME=str(folder)).outcomes
    assert [outcome["class"] for outcome in outcomes] == ["user_error"] * 2
    assert all(re.search(message, outcome["reason"]) for outcome in outcomes), outcomes
    assert not (folder / "ran").exists()
