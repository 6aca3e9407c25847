"""External programs: the recorder, a Trainer callback, TensorBoard, torchrun; read back by REST."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.embedded import ROOT, Orrery, lives

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]

# as it is installed alone: nothing else of Orrery can be imported
RECORDER = ROOT / "workers" / "recorder"


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(orrery: Orrery, tmp_path: Path) -> Iterator[Start]:
    """Starts a Python program with the recorder in its folder, URL and token in its environment."""
    assert orrery.client is not None
    token = orrery.client.headers["Authorization"].removeprefix("Bearer ")
    environ = {
        **orrery.environ,
        "ORRERY_URL": orrery.url,
        "ORRERY_TOKEN": token,
        "HF_HUB_OFFLINE": "1",
    }
    environ |= {
        "ORRERY_SPOOL": str(tmp_path / "spool"),
        "PYTHONPATH": str(RECORDER),
        "PYTHONUNBUFFERED": "1",
    }
    begun = []

    def begin(*words: str | Path) -> subprocess.Popen[bytes]:
        with open(tmp_path / "words", "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=tmp_path, env=environ, stdout=file, stderr=file
            )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait(30)


def ended_well(
    orrery: Orrery, process: subprocess.Popen[bytes], words: Path, seconds: float = 300
) -> None:
    assert process.wait(seconds) == 0, f"{words.read_text()[-3000:]}\n{orrery.last_lines()}"


def run_named(orrery: Orrery, name: str) -> dict[str, Any]:
    match = [
        run for run in orrery.get("runs", kind="external", limit=50)["items"] if run["name"] == name
    ]
    assert len(match) == 1, f"one run named {name}, found {match}"
    return dict(match[0])


def log_lines(orrery: Orrery, run: str, **params: Any) -> list[str]:
    return [line["text"] for line in orrery.get(f"runs/{run}/logs", limit=200, **params)["items"]]


LOOP = """
import os, pathlib, sys, time
import orrery_recorder
run = orrery_recorder.init(name=sys.argv[1])
step = 0
while not pathlib.Path(sys.argv[2]).exists():
    step += 1
    run.log({"loss": 4 / step, "lr": 0.1}, step=step, tokens=32 * step)
    if step % 100 == 0:
        run.line(f"step {step}")
        run.event("milestone", {"step": step})
    pathlib.Path(sys.argv[1] + ".new").write_text(str(step))
    os.replace(sys.argv[1] + ".new", sys.argv[1])  # a reader always sees a number
    time.sleep(0.02)
sys.exit(0 if run.finish(timeout_s=float(sys.argv[3])) else 3)
"""


def test_recorded_points_survive_a_killed_server(
    orrery: Orrery, start: Start, tmp_path: Path
) -> None:
    """One program continues through the outage, another starts and ends during it."""
    (tmp_path / "loop.py").write_text(LOOP)
    logged = tmp_path / "long"
    long = start("loop.py", "long", "stop", "240")
    run = orrery.until(lambda: run_named(orrery, "long"), 120, "the run is there")["id"]
    orrery.until_step(run, 20)
    assert orrery.state(run) == "running"

    assert orrery.process is not None
    web = psutil.Process(orrery.pid_of("web"))
    orrery.process.kill()
    orrery.process.wait()
    orrery.until(lambda: not lives(web), 60, "the web process follows")
    before = int(logged.read_text())
    (tmp_path / "at once").touch()
    short = start(
        "-c", LOOP.replace("while not", "while step < 5 or not"), "short", "at once", "0.2"
    )
    assert short.wait(180) == 3, "without a server the rest stays in the spool"
    orrery.until(
        lambda: int(logged.read_text()) > before + 100, 180, "the loop continues without a server"
    )

    orrery.start()
    (tmp_path / "stop").touch()
    ended_well(orrery, long, tmp_path / "words")
    last = int(logged.read_text())
    orrery.until_state(run, "finished")
    assert orrery.steps(run) == orrery.steps(run, rank=0, name="lr") == list(range(1, last + 1))
    marks = list(range(100, last + 1, 100))
    assert log_lines(orrery, run) == [f"step {step}" for step in marks]
    assert [event["data"]["step"] for event in orrery.events(run, "milestone")] == marks

    spool = next((tmp_path / "spool").glob("short-*"))
    ended_well(orrery, start("-m", "orrery_recorder", spool), tmp_path / "words")
    result = run_named(orrery, "short")
    assert result["state"] == "finished" and orrery.steps(result["id"]) == list(range(1, 6))


TRAINER = """
import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback
from orrery_hf import OrreryCallback

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
                     max_position_embeddings=32)
rows = [{"input_ids": (ids := torch.randint(0, 64, (16,))), "labels": ids} for _ in range(16)]
arguments = TrainingArguments(output_dir="out", max_steps=12, logging_steps=1,
                              eval_strategy="steps", eval_steps=6, save_steps=12,
                              per_device_train_batch_size=4, report_to=[], use_cpu=True,
                              disable_tqdm=True, include_num_input_tokens_seen="all")
callbacks = [OrreryCallback(name="trainer"), TensorBoardCallback(SummaryWriter("board"))]
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows,
        eval_dataset=rows[:4], callbacks=callbacks).train()
"""


def test_a_trainer_and_its_tensorboard_record_the_same(
    orrery: Orrery, start: Start, tmp_path: Path
) -> None:
    """The real Trainer with its callback, while a follower reads its TensorBoard files."""
    (tmp_path / "board").mkdir()
    (tmp_path / "trainer.py").write_text(TRAINER)
    follower = start(
        "-m", "orrery_follow", "--name", "board", "--tensorboard", "board", "--poll", "0.1"
    )
    ended_well(orrery, start("trainer.py"), tmp_path / "words")
    run = run_named(orrery, "trainer")
    assert run["state"] == "finished"
    followed = orrery.until(lambda: run_named(orrery, "board"), 120, "the follower has begun")["id"]
    orrery.until_step(followed, 12)
    follower.terminate()
    ended_well(orrery, follower, tmp_path / "words")
    assert orrery.state(followed) == "finished"

    for name, steps in (
        ("loss", list(range(1, 13))),
        ("grad_norm", list(range(1, 13))),
        ("val_loss", [6, 12]),
    ):
        result = orrery.get(f"runs/{run['id']}/series", name=name)
        assert result["x"] == steps, name
        read = orrery.get(f"runs/{followed}/series", name=name)
        assert read["x"] == steps, name
        assert read["y"] == pytest.approx(result["y"], rel=1e-6), name  # TensorBoard keeps 32 bits
    tokens = orrery.get(f"runs/{run['id']}/series", name="loss", x="tokens")["x"]
    assert tokens == [64 * step for step in range(1, 13)]
    assert run["spec"]["model"]["layers"] == 2
    saved = orrery.get(f"runs/{run['id']}/events", type="checkpoint_saved")["items"]
    assert [event["data"]["step"] for event in saved] == [12]


SCRIPT = """
import argparse, os
import torch, torch.distributed as dist
import orrery_recorder

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
rank = dist.get_rank()
run = orrery_recorder.init()
for step in range(1, steps + 1):
    loss = torch.tensor([1.0 + rank]) / step
    dist.all_reduce(loss)
    run.log({"loss": loss, "mine": rank}, step=step)
run.event("milestone", {"flavour": os.environ["FLAVOUR"]})
print(f"rank {rank} of {dist.get_world_size()} is done")
run.finish()
dist.destroy_process_group()
"""


def test_a_users_program_runs_on_the_cluster(orrery: Orrery) -> None:
    folder = orrery.home / "data" / "own"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    script = {
        "command": ["train.py", "--steps", "30"],
        "workdir": "own",
        "env": {"FLAVOUR": "plain"},
    }
    run = orrery.submit(
        {"kind": "script", "script": script, "resources": {"devices": 2}}, name="own program"
    )
    state = orrery.until_state(run, "finished", "failed", "cancelled")
    assert state == "finished", f"{orrery.get(f'runs/{run}')['exit']}\n{orrery.last_lines()}"
    orrery.until_reported(run)
    for rank in (0, 1):
        result = orrery.get(f"runs/{run}/series", name="loss", rank=rank)
        assert result["x"] == list(range(1, 31))
        assert result["y"] == pytest.approx([3 / step for step in range(1, 31)])
        assert set(orrery.get(f"runs/{run}/series", name="mine", rank=rank)["y"]) == {rank}
        message = f"rank {rank} of 2 is done"
        orrery.until(
            lambda rank=rank, message=message: message in log_lines(orrery, run, rank=rank),
            60,
            message,
        )
    events = orrery.get(f"runs/{run}/events", type="milestone")["items"]
    assert [(event["rank"], event["data"]) for event in events] == [
        (r, {"flavour": "plain"}) for r in (0, 1)
    ]
