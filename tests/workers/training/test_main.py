"""The training command: refused specs, --print, --fake-ranks, and real ranks under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workers.training.conftest import make_spec
from tests.workers.training.pool import read_lines
from workers.training.main import main

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENGINE = ["-m", "workers.training.main"]


def write_spec(tmp_path, spec):
    (tmp_path / "run.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return ["--spec", str(tmp_path / "run.json"), "--dir", str(tmp_path / "out")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "auto"}, "the engine does not choose a plan itself"),
        ({"plan": {"dp": 2}}, "2 devices, but 1 process started"),
        ({"plan": {"global_batch_size": 3, "micro_batch_size": 2}}, "3 sequences do not divide"),
        ({"plan": {"params_dtype": "bf16"}}, "does not run params_dtype bf16. Use fp32"),
        ({"plan": {"dp": 2, "offload": "all"}}, "replicates them on 2 ranks. Use zero 3"),
        (
            {"plan": {"pp": 2, "tp": 2, "schedule": "pipedream"}},
            "pipedream can be combined with dp only, tp is 2",
        ),
        (
            {"plan": {"loss_scale": {"initial": 64}}},
            "loss scaling is for fp16 gradients, precision is fp32",
        ),
        ({"plan": {"nonsense": 1}}, "nonsense is not a field"),
        ({"model": "llama-tinny"}, "Use llama-tiny"),
        ({"model": {"path": "/weights"}}, "model: /weights does not exist"),
        ({"kind": "external", "train": None}, "this is external"),
        ({"train": {"steps": 1, "seq_len": 8, "objective": "dpo"}}, "trains on examples"),
        ({"train": {"steps": 1}}, "seq_len is missing"),
        (
            {
                "data": {"path": "prompts.jsonl", "format": "prompt_completion"},
                "plan": {"global_batch_size": 2},
                "train": {
                    "steps": 1,
                    "seq_len": 8,
                    "objective": "ppo",
                    "ppo": {"rewards": [{"kind": "exact"}], "rollout": {"max_new_tokens": 4}},
                },
            },
            "ppo samples answers. Use workers.posttraining.reinforcement.main",
        ),
    ],
    ids=str,
)
def test_refuses_a_spec_with_a_message(change, message, tmp_path, capsys):
    spec = {**make_spec(), **change}
    code = main(
        write_spec(tmp_path, {key: value for key, value in spec.items() if value is not None})
    )
    assert code == 64
    assert message in capsys.readouterr().err
    outcome = json.loads((tmp_path / "out" / "rank-0" / "exit.json").read_text())
    assert (outcome["class"], outcome["step"]) == ("user_error", 0)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "is not a JSON object")]
)
def test_files_without_a_spec_are_refused(text, message, tmp_path, capsys):
    assert main(write_spec(tmp_path, text)) == 64
    assert message in capsys.readouterr().err


def test_print_shows_the_resolved_plan_without_torch(tmp_path):
    args = write_spec(
        tmp_path,
        make_spec("llama-tiny", {"dp": 4, "zero": 3, "dp_replicate": 2, "global_batch_size": 16}),
    )
    code = f"import sys; from workers.training.main import main; main({[*args, '--print']!r})"
    code += "; assert 'torch' not in sys.modules"
    finished_process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENV, capture_output=True, text=True, check=True
    )
    report = json.loads(finished_process.stdout)
    assert report["mesh"] == {"dp_replicate": 2, "dp_shard": 2}
    assert (report["accumulation"], report["tokens_per_step"], report["world_size"]) == (4, 256, 4)
    assert not (tmp_path / "out").exists()


def test_fake_ranks_report_every_shard(tmp_path, capsys):
    args = write_spec(tmp_path, make_spec("llama2-7b", {"dp": 64, "zero": 3}))
    assert main([*args, "--fake-ranks", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["ranks"]) == 64
    assert report["parameters"] == 6_738_415_616
    assert sum(rank["parameter_bytes"] for rank in report["ranks"]) == 4 * report["parameters"]
    assert main([*args, "--fake-ranks", "8"]) == 64


def test_two_real_ranks_train_until_sigterm_then_save_and_exit(tmp_path):
    spec = make_spec("llama-tiny", {"dp": 2, "zero": 3, "micro_batch_size": 2}, steps=100_000)
    command = [*TORCHRUN, *ENGINE, *write_spec(tmp_path, spec)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        points = tmp_path / "out" / "rank-0" / "points.jsonl"
        deadline = time.monotonic() + 240
        while not (points.exists() and points.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=120)
    folders = [tmp_path / "out" / f"rank-{rank}" for rank in (0, 1)]
    losses = [
        [point["values"]["loss"] for point in read_lines(folder / "points.jsonl")]
        for folder in folders
    ]
    outcomes = [json.loads((folder / "exit.json").read_text()) for folder in folders]
    assert [outcome["class"] for outcome in outcomes] == ["preempted"] * 2
    step = outcomes[0]["step"]
    assert losses[0] == losses[1] and step == outcomes[1]["step"] == len(losses[0]) > 0
    assert (tmp_path / "out" / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
