"""Followed programs: output of TensorBoard, Megatron and torchtitan, one point per step."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.recorder.server import TOKEN, Ingest
from workers.recorder import orrery_recorder, orrery_sources
from workers.recorder.orrery_follow import Journal, main
from workers.recorder.orrery_textlogs import megatron, torchtitan

MEGATRON = (
    " [2026-01-02 10:00:00] iteration       10/     500 | consumed samples:          320 | "
    "elapsed time per iteration "
    "(ms): 523.1 | throughput per GPU (TFLOP/s/GPU): 120.3 | learning rate: 1.500000E-06 | global "
    "batch size:    32 | "
    "lm loss: 1.074000E+01 | loss scale: 65536.0 | grad norm: 5.217 | number of skipped "
    "iterations:   0 |"
)
TITAN = (
    "[titan] 2026-01-02 10:00:00,123 - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  7.1234  "
    "\x1b[38mgrad_norm:  "
    "1.2500  \x1b[34mmemory:  5.50GiB(6.86%)  \x1b[36mtps: 12,345  tflops: 98.70  \x1b[35mmfu: "
    "31.65%\x1b[39m"
)


def follow(server: Ingest, *arguments: str) -> int:
    return main(
        ["--url", server.url, "--token", TOKEN, "--poll", "0.02", "--idle-exit", "0.3", *arguments]
    )


def test_a_megatron_line() -> None:
    numbers = megatron(MEGATRON, seq_len=2048)
    assert numbers is not None and numbers.time is not None
    assert (numbers.step, numbers.tokens) == (10, 320 * 2048)
    assert numbers.values == {
        "step_time_s": pytest.approx(0.5231),
        "tflops_per_device": 120.3,
        "lr": 1.5e-6,
        "loss": 10.74,
        "loss_scale": 65536.0,
        "grad_norm": 5.217,
        "megatron/number_of_skipped_iterations": 0.0,
    }
    validation = megatron(
        " validation loss at iteration 1000 | lm loss value: 2.345000E+00 | lm loss PPL: 1.04E+01 |"
    )
    assert validation is not None and validation.values == {
        "val_loss": 2.345,
        "val_perplexity": 10.4,
    }
    assert megatron("> building train, validation, and test datasets ...") is None


def test_a_torchtitan_line() -> None:
    numbers = torchtitan(TITAN)
    assert numbers is not None and numbers.step == 20
    assert numbers.values == {
        "loss": 7.1234,
        "grad_norm": 1.25,
        "memory/reserved_bytes": 5.5 * 2**30,
        "tokens_per_s_per_device": 12345.0,
        "tflops_per_device": 98.7,
        "mfu": pytest.approx(0.3165),
    }
    validation = torchtitan(
        "[titan] INFO - validate step: 20  loss:  7.5  memory:  5.50GiB(6.86%)  tps: 1,000"
    )
    assert validation is not None and validation.values == {"val_loss": 7.5}
    assert torchtitan("[titan] INFO - Training starts at step 1") is None


def test_a_log_is_followed_and_gone_on_with(server: Ingest, tmp_path: Path) -> None:
    log, spool = tmp_path / "train.log", str(tmp_path / "s")
    # the last line is still being written
    log.write_text(f"start\n{MEGATRON}\n iteration  11/ 500 | lm loss: 1.0")
    run = [
        sys.executable,
        "-m",
        "workers.recorder.follow",
        "--url",
        server.url,
        "--token",
        TOKEN,
        "--poll",
        "0.02",
    ]
    command = [*run, "--megatron-log", str(log), "--spool", spool]
    process = subprocess.Popen(command)
    try:
        wait(lambda: len(server.store.get("r1", {}).get("points", {})) == 1)
        process.kill()  # a restarted follower continues
        process.wait(timeout=120)
        with log.open("a") as file:
            file.write("5E+00 |\n")
        assert follow(server, "--megatron-log", str(log), "--spool", spool) == 0
    finally:
        process.kill()
        process.wait(timeout=120)
    assert [(p["step"], p["values"]["loss"]) for p in server.points("r1")] == [
        (10, 10.74),
        (11, 1.05),
    ]
    assert next(line["text"] for line in server.store["r1"]["logs"].values()) == "start"
    assert server.ends["r1"]["status"] == "finished" and len(server.runs) == 1


def test_a_tensorboard_directory_is_followed(server: Ingest, tmp_path: Path) -> None:
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    proto = pytest.importorskip("tensorboard.compat.proto")
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2

    assert proto
    writer = writer_module.EventFileWriter(str(tmp_path / "tb"))
    for step in range(1, 51):
        for tag, value in (
            ("train/loss", 1 / step),
            ("train/learning_rate", 0.5),
            ("custom/thing", float(step)),
        ):
            simple = summary_pb2.Summary(
                value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)]
            )
            writer.add_event(event_pb2.Event(wall_time=1.7e9 + step, step=step, summary=simple))
    mean = summary_pb2.Summary(
        value=[summary_pb2.Summary.Value(tag="train/train_loss", simple_value=9.0)]
    )
    # as the Trainer ends
    writer.add_event(event_pb2.Event(wall_time=1.7e9 + 50, step=50, summary=mean))
    writer.flush()
    below = writer_module.EventFileWriter(str(tmp_path / "tb" / "validation"))
    tensor = tensor_pb2.TensorProto(dtype=1, float_val=[0.25])
    summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="loss", tensor=tensor)])
    below.add_event(event_pb2.Event(wall_time=1.7e9, step=50, summary=summary))
    below.close()
    assert follow(server, "--tensorboard", str(tmp_path / "tb")) == 0
    writer.close()
    points = server.points("r1")
    assert [p["step"] for p in points] == list(range(1, 51))
    assert points[3]["values"] == {"loss": 0.25, "lr": 0.5, "custom/thing": 4.0}
    assert points[3]["time"] == 1.7e9 + 4
    assert points[49]["values"]["val_loss"] == 0.25
    assert (points[49]["values"]["loss"], points[49]["values"]["train/train_loss"]) == (
        pytest.approx(0.02),
        9.0,
    )


def test_a_tensorboard_follower_survives_kills_and_stops(server: Ingest, tmp_path: Path) -> None:
    """A real SummaryWriter, while its follower is killed or stopped at any moment."""
    writer_module = pytest.importorskip("torch.utils.tensorboard")
    board, spool = tmp_path / "tb", str(tmp_path / "s")
    command = [sys.executable, "-m", "workers.recorder.follow", "--url", server.url]
    command += ["--token", TOKEN, "--poll", "0.01", "--tensorboard", str(board), "--spool", spool]
    step = 0
    with writer_module.SummaryWriter(str(board)) as writer:
        for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            process = subprocess.Popen(command)
            try:
                before = len(server.store.get("r1", {}).get("points", {}))
                while len(server.store.get("r1", {}).get("points", {})) < before + 20:
                    step += 1
                    writer.add_scalar("train/loss", 1 / step, step, walltime=1.7e9 + step)
                    writer.add_scalar("train/lr", 0.5, step, walltime=1.7e9 + step)
                    if step % 3 == 0:
                        writer.flush()
                    time.sleep(0.005)
                # the last steps are not sent yet
                process.send_signal(end)
                assert process.wait(timeout=120) == (0 if end == signal.SIGTERM else -end)
            finally:
                process.kill()
                process.wait(timeout=120)
            assert server.ends == {}, "the run stays open for the next follower"
    assert follow(server, "--tensorboard", str(board), "--spool", spool) == 0
    points = server.points("r1")
    # a step that was cut by a flush may come as two points with one metric each
    for name in ("loss", "lr"):
        steps = [point["step"] for point in points if name in point["values"]]
        assert steps == list(range(1, step + 1)), name
    assert server.ends["r1"]["status"] == "finished" and len(server.runs) == 1


@pytest.mark.parametrize("logged", [0, 1, 3])
def test_a_batch_that_a_kill_cuts_is_completed(
    server: Ingest, tmp_path: Path, logged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [{"step": n, "tokens": None, "time": 1.7e9 + n, "values": {"loss": n}} for n in (1, 2)]
    items = [{"text": "a"}, steps[0], {"text": "b"}, steps[1]]
    left = iter(range(logged))

    def cut(original: Callable[..., None]) -> Callable[..., None]:
        def call(*values: Any, **named: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            original(*values, **named)

        return call

    arguments = {"url": server.url, "token": TOKEN, "spool": tmp_path / "s", "rank": 0}
    first = orrery_recorder.init(**arguments)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(first, "log", cut(first.log))
        patched.setattr(first, "line", cut(first.line))
        Journal(first).log(items, {"positions": {"file": 7}})
    first.detach()
    second = orrery_recorder.init(**arguments)
    journal = Journal(second)
    assert journal.state == {"positions": {"file": 7}}
    journal.recover()
    second.finish()
    assert [point["step"] for point in server.points("r1")] == [1, 2]
    assert [line["text"] for line in server.store["r1"]["logs"].values()] == ["a", "b"]
    assert len(server.runs) == 1


def test_large_event_files_are_read_in_portions(
    server: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer_module = pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.setattr(orrery_sources, "PORTION_BYTES", 500)
    for folder, every in (("tb", 1), ("tb/validation", 10)):
        with writer_module.SummaryWriter(str(tmp_path / folder)) as writer:
            for step in range(1, 101):
                if step % every == 0:
                    writer.add_scalar("loss", float(step), step)
                    writer.add_text("note", "n" * 2000, step)  # longer than a portion
    assert follow(server, "--tensorboard", str(tmp_path / "tb")) == 0
    points = server.points("r1")
    assert [point["step"] for point in points] == list(range(1, 101))
    assert [p["step"] for p in points if "val_loss" in p["values"]] == list(range(10, 101, 10))


def test_a_follower_without_an_address_fails_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--torchtitan-log", str(tmp_path / "x")]) == 2
    assert "give url" in caplog.text


def wait(done: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
