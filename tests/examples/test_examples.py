"""The files in examples/ are valid, and the commands in its README run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers.training import forked_program
from tests.workers.training.pool import train_alone
from workers.contracts import RunSpec

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SPECS = sorted(path for path in EXAMPLES.glob("*.json") if not path.name.startswith("sweep_"))
ADAPTERS = ("lora", "qlora", "bitfit", "prefix")
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


def run_module(module: str, *arguments: str, output: Path, ranks: int = 1) -> None:
    ended = forked_program.run_module(module, *arguments, output=output, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.output[-6000:]


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


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "train_fp16_with_checkpoints",
    ],
)
def test_training_on_one_process(name: str, tmp_path: Path) -> None:
    spec = EXAMPLES / f"{name}.json"
    command = ("workers.training.main", "--spec", str(spec), "--dir", str(tmp_path / "run"))
    run_module(*command, output=tmp_path / "output")
    history = losses(tmp_path / "run")
    assert len(history) == json.loads(spec.read_text())["train"]["steps"]
    assert min(history[-3:]) < history[0]


def test_training_under_torchrun(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    spec = str(EXAMPLES / "train_pipeline_zero_bubble.json")
    run(*launch, "-m", "workers.training.main", "--spec", spec, "--dir", str(tmp_path))
    assert len(losses(tmp_path)) == 10


def test_training_on_four_ranks(tmp_path: Path) -> None:
    spec = str(EXAMPLES / "train_zero3_tensor_parallel.json")
    command = ("workers.training.main", "--spec", spec, "--dir", str(tmp_path / "run"))
    run_module(*command, output=tmp_path / "output", ranks=4)
    assert len(losses(tmp_path / "run")) == 10


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    command = ("workers.training.main", "--spec", str(EXAMPLES / "train_base.json"))
    run_module(*command, "--dir", str(folder / "base"), output=folder / "output")
    return folder / "base"


def trained(name: str, folder: Path, **more: dict[str, Any]) -> list[float]:
    """The losses of a recipe, run in this process from the project's folder."""
    spec = json.loads((EXAMPLES / f"{name}.json").read_text())
    for field, value in more.items():
        assert field in spec["train"]
        spec["train"][field] |= value
    result = train_alone(spec, folder)
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert len(result.values("loss")) == spec["train"]["steps"]
    return result.values("loss")


RECIPES = ("finetune_sft", "finetune_dpo", "finetune_kto", "finetune_reward")


@pytest.mark.parametrize("name", [*RECIPES, "train_freeze_experts"])
def test_recipes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    history = trained(name, tmp_path)
    assert min(history[-3:]) < history[0]


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    history = trained(f"train_{name}", tmp_path, init_from={"path": str(base)})
    assert min(history[-3:]) < history[0]
    assert (tmp_path / "checkpoints" / "step-00000010" / "adapter_model.safetensors").is_file()


def test_distillation(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    teacher = {"teacher": {"path": str(base)}}
    history = trained("finetune_distill", tmp_path, distill=teacher)
    assert history[-1] < history[0] / 2


def test_policy_optimization(tmp_path: Path) -> None:
    """Fewer steps than the example has: the base model first, then updates from its own answers."""
    base, policy = (
        json.loads((EXAMPLES / f"train_{name}.json").read_text()) for name in ("reverse", "grpo")
    )
    base["train"]["steps"] = base["train"]["checkpoint"]["every_steps"] = 2
    where = tmp_path / "reverser" / "checkpoints"
    assert policy["train"]["init_from"] == {"path": "reverser/checkpoints/step-00000060"}
    policy["train"] |= {"init_from": {"path": str(where / "step-00000002")}, "steps": 2}
    for name, spec in (("reverser", base), ("out", policy)):
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
        module = "training" if name == "reverser" else "posttraining.reinforcement"
        command = ("--spec", str(tmp_path / f"{name}.json"), "--dir", str(tmp_path / name))
        run_module(f"workers.{module}.main", *command, output=tmp_path / f"{name}.log")
    rollouts = (tmp_path / "out" / "rank-0" / "rollouts.jsonl").read_text().splitlines()
    assert len(rollouts) == 2 * 128 and json.loads(rollouts[0])["expected"]


def test_reward_model_and_ppo(tmp_path: Path) -> None:
    """Fewer steps than the examples have; each run starts from the one before."""
    names = ("train_reverse", "train_reverse_reward", "train_ppo")
    base, reward, policy = (json.loads((EXAMPLES / f"{name}.json").read_text()) for name in names)
    reward_weights = {"path": "reverse_reward/checkpoints/step-00000400"}
    assert reward["train"]["init_from"] == policy["train"]["init_from"]
    assert policy["train"]["ppo"]["reward_model"] == reward_weights
    assert reward["train"]["steps"] == reward["train"]["checkpoint"]["every_steps"] == 400
    for spec in (base, reward):
        spec["train"] |= {"steps": 2, "checkpoint": {"every_steps": 2}, "lr_schedule": {}}
    start, scores = (
        {"path": str(tmp_path / name / "checkpoints" / "step-00000002")}
        for name in ("base", "reward")
    )
    reward["train"]["init_from"] = policy["train"]["init_from"] = start
    policy["train"]["ppo"] |= {"reward_model": scores, "value": {"init_from": scores}}
    policy["train"]["steps"] = 4
    for name, spec in (("base", base), ("reward", reward), ("ppo", policy)):
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
        module = "posttraining.reinforcement" if name == "ppo" else "training"
        command = ("--spec", str(tmp_path / f"{name}.json"), "--dir", str(tmp_path / name))
        run_module(f"workers.{module}.main", *command, output=tmp_path / f"{name}.log")
    lines = (tmp_path / "ppo" / "rank-0" / "points.jsonl").read_text().splitlines()
    values = json.loads(lines[-1])["values"]
    assert {"reward/reward_model", "reward/exact", "value_loss"} <= set(values)


def test_benchmark(tmp_path: Path) -> None:
    spec = str(EXAMPLES / "benchmark.json")
    command = ("workers.training.benchmark.main", "--spec", spec, "--dir", str(tmp_path / "run"))
    run_module(*command, output=tmp_path / "output")
    assert json.loads((tmp_path / "run" / "benchmark.json").read_text())


def test_generate(tmp_path: Path) -> None:
    spec = json.loads((EXAMPLES / "generate.json").read_text())
    spec["generate"]["output"] = str(tmp_path / "answers.jsonl")
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    command = ("workers.inference.main", "--spec", str(path), "--dir", str(tmp_path))
    run_module(*command, output=tmp_path / "output")
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
