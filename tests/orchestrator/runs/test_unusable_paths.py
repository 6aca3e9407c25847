"""Paths that no file can have are problems of their fields, never errors of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.submission.data_paths import resolve_path
from tests import factories

UNUSABLE = ["x" * 300, "~unknown/data.jsonl", "x/" * 3000, "a\0b", "/" + "y" * 5000]


@pytest.mark.parametrize("path", UNUSABLE, ids=["name", "user", "path", "nul", "absolute"])
def test_an_unusable_path_is_a_problem_of_its_field(path: str, tmp_path: Path) -> None:
    resolved, [problem] = resolve_path("data.path", path, [tmp_path])
    assert resolved is None and problem.field == "data.path" and problem.hint


@pytest.mark.django_db
@pytest.mark.parametrize("path", UNUSABLE, ids=["name", "user", "path", "nul", "absolute"])
def test_a_spec_with_an_unusable_path_is_refused(
    owner: User, path: str, tmp_path: Path, settings: Any
) -> None:
    settings.DATA_ROOTS = [tmp_path]
    answer = factories.api(owner).post(
        "/api/v1/runs",
        {"spec": json.loads(Path("examples/train.json").read_text()) | {"data": {"path": path}}},
        content_type="application/json",
    )
    assert answer.status_code == 422, answer.content
    assert [each["field"] for each in answer.json()["errors"]] == ["data.path"]
