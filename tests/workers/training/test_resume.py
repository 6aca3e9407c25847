"""A resumed run goes on exactly, under its own plan or another; damaged and foreign checkpoints are told."""

from __future__ import annotations

import json

import pytest

from tests.workers.training.conftest import make_spec

HALF, WHOLE = 5, 10


def spec(plan, steps, **more):
    schedule = {"name": "linear", "min_lr": 1e-4}
    found = make_spec(None, {"global_batch_size": 8, "micro_batch_size": 2, **plan}, steps=steps, clip_norm=1.0, **more)
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
        straight.values("loss")[HALF:] if exact else pytest.approx(straight.values("loss")[HALF:], rel=1e-5)
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
    assert "checksum" in events["checkpoint_rejected"]["says"]
    assert events["checkpoint_restored"]["step"] == 6


def test_named_checkpoint_of_another_place(train, straight, tmp_path):
    train(spec({}, HALF, checkpoint={"every_steps": HALF}), tmp_path / "first")
    folder = tmp_path / "first" / "checkpoints" / "step-00000005"
    result = train(spec({}, WHOLE), tmp_path / "second", ORRERY_RESUME=str(folder), ORRERY_ATTEMPT="7")
    assert result.values("loss") == straight.values("loss")[HALF:]
    assert {point["attempt"] for point in result.points()} == {7}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["samples"], manifest["tokens"]) == (5, 40, 640)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["train"].update(seed=4), "rng.seed 3, the spec says 4"),
        (lambda s: s["model"].update(hidden=64), "model.hidden 32, the spec says 64"),
        (lambda s: s["train"].update(seq_len=8), "seq_len 16, the spec says 8"),
    ],
)
def test_checkpoint_of_another_run_is_refused(change, says, train, tmp_path):
    train(spec({}, 1, checkpoint={"every_steps": 1}), tmp_path)
    other = json.loads(json.dumps(spec({}, 2)))
    change(other)
    outcome = train(other, tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert says in outcome["reason"]


def test_resume_from_nowhere_is_refused(train, tmp_path):
    outcome = train(spec({}, 2), tmp_path, ORRERY_RESUME=str(tmp_path / "nothing")).outcomes[0]
    assert outcome["class"] == "user_error"
    assert "manifest.json" in outcome["reason"]
