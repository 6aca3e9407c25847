"""`manage.py plan`, `calibrate` and `planner_accuracy`: output, exit codes, messages."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from tests.orchestrator.planner.test_request_parsing import LINE, LLAMA_CONFIG

ROOT = Path(__file__).resolve().parents[3]
SMALL = [
    "--model",
    "llama2-7b",
    "--device",
    "a100-80g",
    "--nodes",
    "1",
    "--devices-per-node",
    "8",
    "--seq-len",
    "2048",
    "--global-batch",
    "64",
]


def plan(*arguments: str) -> str:
    out = io.StringIO()
    call_command("plan", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def refused(command: str, *arguments: str) -> str:
    with pytest.raises(CommandError) as caught:
        call_command(command, *arguments, stdout=io.StringIO(), stderr=io.StringIO())
    assert caught.value.returncode == 2
    return str(caught.value)


def measurements(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_plan_needs_no_database_and_no_redis(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_bytes(
        b'{"id": 1}\n\xff\xfe\n\nnot json\n'
        + json.dumps(LINE).encode()
        + b"\r\n"
        + b'{"id": "\\ud800"}\n'
    )
    environ = {
        **os.environ,
        "ORRERY_HOME": str(tmp_path / "home"),
        "DATABASE_URL": "postgresql://user@127.0.0.1:9/none",
        "REDIS_URL": "redis://127.0.0.1:9/0",
        "DJANGO_SETTINGS_MODULE": "orchestrator.config.settings",
    }
    environ.pop("ORRERY_SECRET_KEY", None)
    command = [sys.executable, "manage.py", "plan", "--requests", str(requests)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    reported = [(each["id"], each["ok"]) for each in answers]
    assert reported == [(1, False), (None, False), (None, False), ("q1", True), ("\ud800", False)]
    command = [sys.executable, "manage.py", "plan", *SMALL, "--device", "a200", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "a100" in done.stderr
    assert not (tmp_path / "home").exists()


def test_a_search_prints_a_summary_and_a_table() -> None:
    text = plan(*SMALL, "--tokens", "2e12", "--fix", "tp=1|2,zero=1", "--top", "4")
    first, blank, head, *rows = text.splitlines()
    assert first.startswith("llama2-7b on 1 x 8 x a100-80g") and "MFU" in first and blank == ""
    assert head.split()[:2] == ["dp", "tp"] and "days" in head
    assert [row.split()[0].rstrip("*") for row in rows[:4]] == ["1", "2", "3", "4"]
    assert "peak_flops" in plan(*SMALL, "--explain", "--top", "1")


def test_json_prints_one_document() -> None:
    answer = json.loads(plan(*SMALL, "--json", "--top", "2"))
    assert set(answer) >= {"enumerated", "legal", "fit", "seconds", "plans", "pareto", "rejected"}
    tree = json.loads(plan(*SMALL, "--json", "--explain", "--top", "1"))["plans"][0]["memory"][
        "total_bytes"
    ]
    assert set(tree) == {"name", "value", "unit", "formula", "inputs", "source"}


def test_a_config_file_is_accepted_and_a_plan_is_exported(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_CONFIG))
    of_file = ["--model", str(file), *SMALL[2:]]
    assert json.loads(plan(*of_file, "--json", "--top", "1"))["plans"][0]["fits"]
    assert (
        json.loads(plan(*of_file, "--export", "deepspeed", "--fix", "pp=1,tp=1"))[
            "train_batch_size"
        ]
        == 64
    )
    small = ["--model", "llama3-70b", "--device", "l40s-48g", *SMALL[4:]]
    assert json.loads(plan(*small, "--json", "--top", "1"))["plans"][0]["plan"]["offload"] != "none"
    assert json.loads(plan(*small, "--export", "deepspeed"))["zero_optimization"]["stage"] == 3
    assert "[parallelism]" in plan(*SMALL, "--export", "torchtitan", "--fix", "pp=1")


def test_inference_prints_a_summary() -> None:
    assert "each next token" in plan("--inference", *SMALL)
    answer = json.loads(
        plan(
            "--inference", *SMALL[:-4], "--prompt-len", "512", "--batch", "4", "--tp", "2", "--json"
        )
    )
    assert (answer["batch"], answer["devices"]) == (4, 2) and answer["tpot_s"] > 0


def test_bad_input_exits_with_2_and_a_message(tmp_path: Path) -> None:
    assert "--model" in refused("plan")
    assert "--seq-len" in refused("plan", "--model", "llama2-7b", "--global-batch", "8")
    assert "--model" in refused("plan", "--model", "lama2", *SMALL[2:])
    assert "tp" in refused("plan", *SMALL, "--fix", "tp")
    assert "--nodes" in refused("plan", *SMALL, "--nodes", "1000000")
    assert "tp 3" in refused("plan", *SMALL, "--fix", "tp=3")
    assert "jax" in refused("plan", *SMALL, "--export", "jax")
    assert "none.jsonl" in refused("plan", "--requests", str(tmp_path / "none.jsonl"))
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert "calibrate" in refused("plan", *SMALL, "--calibration", str(wrong))
    empty = measurements(tmp_path / "empty.jsonl", [LINE])
    assert "measured" in refused(
        "calibrate", "--measurements", str(empty), "--out", str(tmp_path / "out.json")
    )


def test_a_calibration_moves_predictions_to_measurements(tmp_path: Path) -> None:
    def predicted(*arguments: str) -> list[float]:
        return [
            json.loads(line)["step_time_s"]
            for line in plan("--requests", str(requested), *arguments).splitlines()
        ]

    lines = [
        {
            **LINE,
            "id": batch,
            "plan": {**LINE["plan"], "global_batch_size": batch},
            "workload": {"seq_len": seq_len},
        }
        for batch in (8, 16, 32)
        for seq_len in (2048, 4096, 8192)
    ]
    requested = measurements(tmp_path / "asked.jsonl", lines)
    measured = [1.4 * each for each in predicted()]
    file = measurements(
        tmp_path / "measured.jsonl",
        [
            {**line, "measured": {"step_time_s": time}}
            for line, time in zip(lines, measured, strict=True)
        ],
    )
    out = tmp_path / "calibration.json"
    output = io.StringIO()
    call_command(
        "calibrate",
        "--measurements",
        str(file),
        "--out",
        str(out),
        stdout=output,
        stderr=io.StringIO(),
    )
    assert "9 of 9" in output.getvalue()
    for now, wanted in zip(predicted("--calibration", str(out)), measured, strict=True):
        assert now == pytest.approx(wanted, rel=0.05)


def test_the_accuracy_report_replaces_only_its_table(tmp_path: Path) -> None:
    def make() -> str:
        call_command(
            "planner_accuracy",
            "--measurements",
            str(tmp_path),
            "--out",
            str(out),
            stdout=io.StringIO(),
        )
        return out.read_text()

    out = tmp_path / "accuracy.md"
    assert "measurement file" in refused(
        "planner_accuracy", "--measurements", str(tmp_path), "--out", str(out)
    )
    measurements(tmp_path / "korthikanti.jsonl", [{**LINE, "measured": {"step_time_s": 2.0}}])
    out.write_text("# Mine\n\nBefore.\n")
    first = make()
    assert (
        first.startswith("# Mine\n\nBefore.\n")
        and "| step time, no calibration | korthikanti | 1 |" in first
    )
    out.write_text(first + "\nAfter.\n")
    measurements(tmp_path / "korthikanti.jsonl", [{**LINE, "measured": {"step_time_s": 3.0}}] * 2)
    second = make()
    assert "korthikanti | 2 |" in second and "korthikanti | 1 |" not in second
    assert second.startswith("# Mine\n\nBefore.\n") and second.endswith("\nAfter.\n")
    out.write_text(second.replace("<!-- measured: end -->", ""))
    assert "mark" in refused("planner_accuracy", "--measurements", str(tmp_path), "--out", str(out))
