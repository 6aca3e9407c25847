"""Runs on the user's data: mixed, tokenized, resumed, and ended by a sentence where it cannot be
used.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.workers.training.conftest import make_spec


def test_wrong_data_ends_a_run_by_a_sentence_on_every_rank(train, tmp_path):
    plan = {"dp": 2, "zero": 3, "micro_batch_size": 1}
    (tmp_path / "short.txt").write_text("too short")
    spec = {**make_spec(None, plan), "data": {"path": str(tmp_path / "short.txt")}}
    result = train(spec, tmp_path)
    assert [o["class"] for o in result.outcomes] == ["user_error"] * 2
    assert all(
        "9 tokens are shorter than one sequence of 16 + 1" in o["reason"] for o in result.outcomes
    )


def test_ids_outside_the_vocabulary(train, tmp_path):
    np.full(1000, 300, "<u2").tofile(tmp_path / "a.bin")
    spec = {**make_spec(), "data": {"path": str(tmp_path / "a.bin"), "format": "tokens"}}
    outcome = train(spec, tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert "token id 300" in outcome["reason"]


def mixed(tmp_path, plan, **train):
    (tmp_path / "verse.jsonl").write_text(
        "".join(
            json.dumps({"text": f"The {n}th line says: nothing follows from {n} nothings."}) + "\n"
            for n in range(60)
        )
    )
    sources = [
        {"preset": "shakespeare", "weight": 0.7},
        {"path": str(tmp_path / "verse.jsonl"), "format": "jsonl"},
    ]
    sources[1]["weight"] = 0.3
    spec = make_spec(
        None, {"global_batch_size": 8, "micro_batch_size": 2, **plan}, clip_norm=1.0, **train
    )
    return {
        **spec,
        "data": {"sources": sources, "tokenizer": {"vocab": 256 + 1}},
        "model": {**spec["model"], "vocab": 300},
    }


def test_a_mixture_with_its_own_tokenizer_goes_on_exactly_under_another_plan(train, tmp_path):
    """Seven of the thirty batches' worth of verse make an epoch, so both sources' orders change on
    the way.
    """
    checkpoint = {"every_steps": 5}
    straight = train(mixed(tmp_path, {}, steps=10), tmp_path / "straight")
    assert straight.outcomes[0]["class"] == "ok"
    train(mixed(tmp_path, {"dp": 2, "zero": 3}, steps=5, checkpoint=checkpoint), tmp_path / "cut")
    resumed = train(mixed(tmp_path, {}, steps=10, checkpoint=checkpoint), tmp_path / "cut")
    assert resumed.values("loss") == pytest.approx(straight.values("loss"), rel=1e-5)
    assert (tmp_path / "cut" / "checkpoints" / "tokenizer.json").is_file()
    for name in ("loss/shakespeare", "loss/verse"):
        assert resumed.values(name) == pytest.approx(straight.values(name), rel=1e-5)
    mean = {
        name: sum(straight.values(name)) / 10 for name in ("loss", "loss/shakespeare", "loss/verse")
    }
    assert mean["loss"] == pytest.approx(
        0.7 * mean["loss/shakespeare"] + 0.3 * mean["loss/verse"], rel=1e-3
    )
