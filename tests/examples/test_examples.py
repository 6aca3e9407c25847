"""The files in examples/ are valid, and the commands in its README run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.contracts import RunSpec

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SPECS = sorted(EXAMPLES.glob("*.json"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(folder: Path) -> list[float]:
    lines = (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    return [json.loads(line)["values"]["loss"] for line in lines]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_are_valid(path: Path) -> None:
    RunSpec.from_dict(json.loads(path.read_text()))


def test_every_file_is_in_the_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    missing = [
        path.name
        for path in EXAMPLES.iterdir()
        if path.name != "README.md" and path.is_file() and f"`{path.name}`" not in text
    ]
    assert not missing, missing


@pytest.mark.parametrize("name", ["train", "train_fp16_with_checkpoints"])
def test_training_on_one_process(name: str, tmp_path: Path) -> None:
    spec = EXAMPLES / f"{name}.json"
    run("-m", "workers.training.main", "--spec", str(spec), "--dir", str(tmp_path))
    history = losses(tmp_path)
    assert len(history) == json.loads(spec.read_text())["train"]["steps"]
    assert history[-1] < history[0]


@pytest.mark.parametrize(
    ("name", "ranks"), [("train_zero3_tensor_parallel", 4), ("train_pipeline_zero_bubble", 2)]
)
def test_training_on_several_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    spec = str(EXAMPLES / f"{name}.json")
    run(*launch, "-m", "workers.training.main", "--spec", spec, "--dir", str(tmp_path))
    assert len(losses(tmp_path)) == 10


def test_benchmark(tmp_path: Path) -> None:
    spec = str(EXAMPLES / "benchmark.json")
    run("-m", "workers.training.benchmark.main", "--spec", spec, "--dir", str(tmp_path))
    assert json.loads((tmp_path / "benchmark.json").read_text())


def test_generate(tmp_path: Path) -> None:
    spec = json.loads((EXAMPLES / "generate.json").read_text())
    spec["generate"]["output"] = str(tmp_path / "answers.jsonl")
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    run("-m", "workers.inference.main", "--spec", str(path), "--dir", str(tmp_path))
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == ["sky", "citizen"]
    assert all(len(answer["token_ids"]) == 16 for answer in answers)


def test_plan_requests() -> None:
    shown = run("manage.py", "plan", "--requests", str(EXAMPLES / "plan_requests.jsonl"))
    answers = [json.loads(line) for line in shown.splitlines()]
    assert [(answer["id"], answer["ok"]) for answer in answers] == [
        ("one-node", True),
        ("tensor-and-pipeline", True),
    ]


def test_recorder_does_not_need_a_server(tmp_path: Path) -> None:
    """The recorder never raises into a training loop; points wait on disk."""
    variables = {
        "PYTHONPATH": str(ROOT / "workers" / "recorder"),
        "ORRERY_URL": "http://127.0.0.1:9",
        "ORRERY_TOKEN": "none",
        "STEPS": "3",
    }
    run(str(EXAMPLES / "recorder.py"), cwd=tmp_path, **variables)
