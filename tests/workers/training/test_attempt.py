"""What an attempt writes (points, events, exit file), its control requests, and its failures."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path

import pytest
import torch

from tests.matrix import select
from tests.workers.training.conftest import TINY, make_spec
from workers.contracts.catalog.metrics import METRICS
from workers.contracts.wire.points import Point, RunEvent
from workers.training.loop.step_context import StepContext

TWO = {"dp": 2, "micro_batch_size": 2, "global_batch_size": 4}


def test_every_rank_writes_points_and_events_of_the_contracts(train, tmp_path):
    more = {"eval": {"every_steps": 2, "batches": 1}, "checkpoint": {"every_steps": 3}}
    result = train(
        make_spec(None, {**TWO, "zero": 3}, **more), tmp_path, ORRERY_RUN="r-1", ORRERY_ATTEMPT="3"
    )
    for rank in (0, 1):
        points = [Point.from_dict(line) for line in result.points(rank)]
        assert [(p.run, p.attempt, p.rank, p.seq, p.step) for p in points] == [
            ("r-1", 3, rank, step, step) for step in (1, 2, 3, 4)
        ]
        families = ("grad_norm/", "weight_norm/")
        assert all(
            {name for name in p.values if not name.startswith(families)} <= set(METRICS)
            for p in points
        )
        # of inference, and of a frozen second module
        never = {"memory/kv_cache_bytes", "memory/reference_bytes"}
        always = {name for name in METRICS if name.startswith("memory/")} - never
        always |= {
            "loss",
            "grad_norm",
            "lr",
            "tokens_per_s",
            "step_time_s",
            "mfu",
            "hfu",
            "tflops_per_device",
        }
        assert always <= set(points[0].values)
        assert not never & set(points[0].values)
        assert [("val_loss" in p.values) for p in points] == [False, True, False, True]
        assert json.loads((tmp_path / f"rank-{rank}" / "exit.json").read_text())["class"] == "ok"
    events = [RunEvent.from_dict(line) for line in result.events()]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events] == [
        "peak_measured",
        "plan_resolved",
        "kernels_chosen",
        "checkpoint_saved",
        "checkpoint_saved",
    ]
    assert events[0].data["tflops"] > 0
    ran = {row["op"]: (row["backend"], row["reason"]) for row in events[2].data["operations"]}
    assert {"attention", "rms_norm", "swiglu", "apply_rope", "cross_entropy", "adamw"} <= set(ran)
    assert all(backend in ("torch", "flash") and reason for backend, reason in ran.values())


def test_logs_at_the_interval_and_at_the_last_step(train, tmp_path):
    result = train(make_spec(steps=7, log_every=3), tmp_path)
    assert [(p["seq"], p["step"]) for p in result.points()] == [(1, 3), (2, 6), (3, 7)]


def test_learns_shakespeare(train, tmp_path):
    plan = {"global_batch_size": 16, "micro_batch_size": 16}
    spec = make_spec(
        None,
        plan,
        steps=80,
        seq_len=64,
        optimizer={"lr": 1e-2},
        eval={"every_steps": 80, "batches": 4},
    )
    result = train(spec, tmp_path)
    assert result.values("loss")[0] == pytest.approx(5.55, abs=0.1), "ln 256"
    assert result.values("val_loss")[-1] < 3.0


def test_validation_does_not_change_training(train, tmp_path):
    model = {**TINY, "dropout": 0.2}
    plain = train(make_spec(model), tmp_path / "without")
    validated = train(make_spec(model, eval={"every_steps": 1, "batches": 1}), tmp_path / "between")
    assert validated.values("loss") == plain.values("loss")
    repeated = train(make_spec(model, eval={"every_steps": 1, "batches": 1}), tmp_path / "twice")
    assert repeated.values("val_loss") == validated.values("val_loss"), "no dropout in validation"


@pytest.mark.parametrize(
    ("action", "exit_class", "saved", "plan"),
    select(
        [
            (*action, plan)
            for plan in ({}, {**TWO, "zero": 2})
            for action in (
                ("stop", "cancelled", []),
                ("pause", "preempted", [1]),
                ("preempt", "preempted", [1]),
            )
        ],
        [1, 3, 5],
    ),
    ids=lambda case: ("two" if case else "alone") if isinstance(case, dict) else None,
)
def test_obeys_a_control_request(action, exit_class, saved, plan, train, tmp_path):
    (tmp_path / "control.json").write_text(json.dumps({"action": action, "id": 5}))
    spec = make_spec(None, plan)
    result = train(spec, tmp_path)
    assert {(o["class"], o["step"]) for o in result.outcomes} == {(exit_class, 1)}
    assert [e["data"]["step"] for e in result.events() if e["type"] == "checkpoint_saved"] == saved
    second = train(spec, tmp_path)
    assert second.outcomes[0]["class"] == "ok", "a request takes effect once"
    assert second.points()[-1]["step"] == 4


def test_saves_a_checkpoint_on_request(train, tmp_path):
    (tmp_path / "control.json").write_text(json.dumps({"action": "checkpoint", "id": 1}))
    result = train(make_spec(None, {**TWO, "zero": 1}), tmp_path)
    assert [e["data"]["step"] for e in result.events() if e["type"] == "checkpoint_saved"] == [1]
    assert [o["class"] for o in result.outcomes] == ["ok", "ok"]


@pytest.mark.parametrize("plan", [{}, {**TWO, "zero": 3}], ids=["alone", "two"])
def test_stops_before_a_non_finite_update(plan, train, tmp_path):
    result = train(make_spec(None, plan, steps=20, optimizer={"name": "sgd", "lr": 1e20}), tmp_path)
    assert {o["class"] for o in result.outcomes} == {"numerics"}
    event = next(e for e in result.events() if e["type"] == "non_finite")
    assert event["data"]["step"] == result.outcomes[0]["step"] + 1
    assert event["data"]["parameters"]
    last = Point.from_dict(result.points()[-1])
    assert not all(abs(last.values[name]) < float("inf") for name in ("loss", "grad_norm"))


@pytest.mark.parametrize(
    ("error", "exit_class"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "out_of_memory",
        ),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
            ),
            "out_of_memory",
        ),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:3"
            ),
            "infrastructure",
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv"
            ),
            "hang",
        ),
        (TypeError("a mistake"), "user_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_failures_are_classified_and_reported(
    error, exit_class, train, tmp_path, monkeypatch, capsys
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(StepContext, "loss", fail)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    result = train(make_spec(), tmp_path)
    assert result.outcomes[0]["class"] == exit_class
    reason = result.outcomes[0]["reason"]
    assert str(error).split(":")[0].rstrip(".") in reason
    reported = [event["data"] for event in result.events() if event["type"] == "out_of_memory"]
    assert (
        bool(reported)
        == (exit_class == "out_of_memory")
        == ("(in forward of step 1; weights 0" in reason)
    )
    assert "error: rank 0, forward, after step 0" in capsys.readouterr().err
    assert str(error) in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_a_real_out_of_memory_error_is_reported_with_its_numbers(train, tmp_path):
    """Logits of 2 TiB in a limited address space, because machines may overcommit any size."""
    model = {
        **TINY,
        "layers": 1,
        "hidden": 4,
        "heads": 1,
        "kv_heads": 1,
        "ffn": 4,
        "vocab": 2**21,
        "max_seq_len": 1024,
    }
    model["tie_embeddings"] = True
    plan = {"micro_batch_size": 256, "global_batch_size": 256}
    before, pages = (
        resource.getrlimit(resource.RLIMIT_AS),
        int(Path("/proc/self/statm").read_text().split()[0]),
    )
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**32, before[1]))
    try:
        result = train(make_spec(model, plan, steps=1, seq_len=1024), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    [outcome] = result.outcomes
    assert (outcome["class"], outcome["step"]) == ("out_of_memory", 0)
    assert (
        f"you tried to allocate {2**41} bytes" in outcome["reason"]
        and "enforce" not in outcome["reason"]
    )
    assert "(in forward of step 1; weights 32.0 MiB" in outcome["reason"]
    [data] = [event["data"] for event in result.events() if event["type"] == "out_of_memory"]
    assert (
        data["message"] == outcome["reason"]
        and data["memory/params_bytes"] > 2**25
        and data["phase"] == "forward"
    )


def test_unwritable_run_directory_is_infrastructure(train, tmp_path, capsys):
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "points.jsonl").symlink_to("/dev/full")
    outcome = train(make_spec(steps=200), tmp_path).outcomes[0]
    assert outcome["class"] == "infrastructure"
    assert "No space left" in outcome["reason"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_that_does_not_fit_the_disk_is_infrastructure(asynchronous, train, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond the limit fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        result = train(make_spec(checkpoint={"every_steps": 2, "async": asynchronous}), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.outcomes[0]["class"] == "infrastructure"
    assert "the checkpoint could not be written" in result.outcomes[0]["reason"]
    assert not [
        path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")
    ]
