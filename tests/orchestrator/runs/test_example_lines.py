"""Example files are checked for a run's objective when it is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runs.submission.data_paths import path_problems
from workers.contracts import RunSpec
from workers.contracts.specs.run import spec_problems

GOOD = {"prompt": "2+2=", "completion": "4"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
KTO = {"objective": "dpo", "dpo": {"loss": "kto"}}


def spec(path: Path, format: str, **train: Any) -> RunSpec:
    body = {"steps": 1, "seq_len": 8, "objective": "sft", **train}
    data = {"path": str(path), "format": format}
    return RunSpec.from_dict({"kind": "train", "data": data, "train": body})


def messages(path: Path, lines: list[Any], format: str, **train: Any) -> list[str]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = path.parent
    checked = spec(path, format, **train)
    return [str(each) for each in path_problems(checked, data_roots=[folder], run_root=folder)]


def test_lines_that_an_objective_trains_on_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert messages(path, [GOOD], "prompt_completion") == []
    assert messages(path, [PAIR], "preference", objective="dpo") == []
    assert messages(path, [PAIR], "preference", objective="reward") == []
    assert messages(path, [PAIR], "preference", **KTO) == []


@pytest.mark.parametrize(
    ("lines", "format", "train", "message"),
    [
        ([GOOD, {"prompt": "x"}], "prompt_completion", {}, "line 2: has no field completion"),
        ([PAIR], "prompt_completion", {}, "Use format preference."),
        (
            [{"chosen": "one", "rejected": "two"}],
            "preference",
            {"objective": "dpo"},
            "no common beginning",
        ),
        ([{**PAIR, "rejected": "4"}], "preference", {"objective": "dpo"}, "are equal"),
        ([{**GOOD, "label": True}] * 3, "labelled", KTO, "all 3 answers are labelled good"),
        ([{**GOOD, "label": "yes"}], "labelled", KTO, "label is 'yes'"),
    ],
)
def test_lines_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, lines: list[Any], format: str, train: dict[str, Any], message: str
) -> None:
    [problem] = messages(tmp_path / "a.jsonl", lines, format, **train)
    assert message in problem


def test_a_format_that_does_not_fit_the_objective_is_refused(tmp_path: Path) -> None:
    problems = [str(each) for each in spec_problems(spec(tmp_path, "preference"))]
    assert any(
        "this objective trains on examples, the data is format preference" in each
        and "Use format messages or prompt_completion" in each
        for each in problems
    )
    plain = RunSpec.from_dict(
        {"kind": "train", "train": {"steps": 1, "seq_len": 8, "objective": "sft"}}
    )
    assert any("the data is shakespeare" in str(each) for each in spec_problems(plain))
