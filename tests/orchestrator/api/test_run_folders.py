"""Paths into runs' folders: a submitter, a rank or an event file reaches no other team's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.common import checked_files
from orchestrator.runs import events
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.runs.outputs import endpoint, generated_answers, output_files
from orchestrator.runs.submission import run_paths
from orchestrator.runs.submission.run_paths import in_run_folder
from tests import factories
from workers.contracts.wire.node_messages import AttemptState
from workers.contracts.wire.serving_reports import ENGINE_SNAPSHOT, SERVING

pytestmark = pytest.mark.django_db


@pytest.fixture
def media(tmp_path: Path, settings: Any, data_root: Path) -> Path:
    """The folder of runs, in a data directory of its own."""
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path})
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def trained(owner: User, media: Path) -> Run:
    """A run of `owner` with a checkpoint on disk."""
    run = factories.run(owner)
    (media / str(run.pk) / "checkpoints" / "step-5").mkdir(parents=True)
    (media / str(run.pk) / "notes.jsonl").write_text('{"text": "a"}\n')
    return run


def specs(path: str) -> dict[str, dict[str, Any]]:
    """One spec per field that takes a path."""
    train = {"steps": 20, "seq_len": 64}
    reference = {"objective": "dpo", "dpo": {"reference": {"path": path}}}
    return {
        "model.path": {"kind": "serve", "model": {"path": path}, "serve": {}},
        "serve.draft.path": {"kind": "serve", "serve": {"draft": {"path": path}}},
        "train.init_from.path": factories.spec(train={**train, "init_from": {"path": path}}),
        "data.path": factories.spec(data={"path": path, "format": "text"}),
        "data.tokenizer": factories.spec(data={"preset": "shakespeare", "tokenizer": path}),
        "generate.input": {"kind": "generate", "generate": {"input": path, "output": "a.jsonl"}},
        "script.workdir": {"kind": "script", "script": {"command": ["a.py"], "workdir": path}},
        "train.dpo.reference.path": factories.spec(train={**train, **reference}),
    }


def errors(client: Client, spec: dict[str, Any]) -> dict[str, str]:
    answer = client.post("/api/v1/runs", {"spec": spec, "force": True}, "application/json")
    return {error["field"]: error["message"] for error in answer.json().get("errors", [])}


HIDDEN = "is in no run that you may see"


@pytest.mark.parametrize("how", ["relative", "absolute", "dotted", "link", "missing run"])
def test_a_path_below_a_run_needs_the_right_to_see_it(
    trained: Run, teammate: User, media: Path, data_root: Path, how: str
) -> None:
    other = factories.user("other-team")
    (data_root / "link").symlink_to(media / str(trained.pk))
    path = {
        "relative": f"runs/{trained.pk}/checkpoints/step-5",
        "absolute": str(media / str(trained.pk) / "checkpoints"),
        "dotted": str(data_root / ".." / "runs" / str(trained.pk)),
        "link": str(data_root / "link" / "notes.jsonl"),
        "missing run": "runs/999999/checkpoints",
    }[how]
    for field, spec in specs(path).items():
        refused = errors(factories.api(other), spec)
        if any(name.startswith("train.dpo") or name == "train.objective" for name in refused) and (
            field not in refused
        ):  # a body that this version does not have
            continue
        # a relative path may only mean a folder of the data root, which does not exist
        assert how in ("relative", "missing run") or HIDDEN in refused[field], (field, refused)
        assert refused, field
        if how != "missing run":
            assert HIDDEN not in str(errors(factories.api(teammate), spec)), field


def test_the_preview_does_not_describe_a_hidden_model(trained: Run, media: Path) -> None:
    spec = {"kind": "serve", "model": {"path": f"runs/{trained.pk}"}, "serve": {}}
    hidden = runs.spec_preview(spec, by=factories.user("other-team"))
    assert hidden["plan"] is None and hidden["prediction"] is None
    shown = runs.spec_preview(spec, by=trained.owner)
    assert not any("in no run" in item["message"] for item in shown["problems"])


def test_an_artifact_is_a_file_of_its_own_run(owner: User, media: Path) -> None:
    run, other = factories.external_run(owner), factories.external_run(factories.user("other"))
    for each in (run, other):
        (media / str(each.pk)).mkdir()
        (media / str(each.pk) / "a.txt").write_text(f"of {each.pk}")
    (media / str(run.pk) / "link").symlink_to(media / str(other.pk) / "a.txt")
    client, expected = factories.api(owner), {}
    for path, status in (
        (f"runs/{run.pk}/a.txt", 200),
        (f"runs/{other.pk}/a.txt", 409),
        (f"runs/{run.pk}/../{other.pk}/a.txt", 409),
        (f"runs/{run.pk}/link", 409),
        (str(media / str(other.pk) / "a.txt"), 409),
        (f"runs/{run.pk}/missing", 409),
    ):
        row = runs.artifact_record(run=run, name="a.txt", path=path)
        answer = client.get(f"/api/v1/runs/{run.pk}/artifacts/{row.pk}/download")
        if answer.streaming:
            answer.getvalue()  # closes the file at its end
        expected[path] = (answer.status_code, status)
    assert all(got == wanted for got, wanted in expected.values()), expected


def test_a_link_that_replaces_a_checked_file_is_not_followed(
    owner: User, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank swaps a file for a link between the check and the opening: the web may be root."""
    (media.parent / "secret").write_text('{"id": 1, "text": "secret"}\n')

    def checked(path: Path, folder: Path) -> Path | None:
        resolved = checked_files.resolved_below(path, folder)
        if resolved is not None and resolved.is_file():
            resolved.unlink()
            resolved.symlink_to(media.parent / "secret")
        return resolved

    for module in (run_paths, endpoint, output_files):
        monkeypatch.setattr(module, "resolved_below", checked)
    client = factories.api(owner)
    made = factories.run(owner)
    spec = {"kind": "generate", "generate": {"input": "in.jsonl", "output": "out.jsonl"}}
    rank = media / str(made.pk) / "attempt-1" / "rank-0"
    rank.mkdir(parents=True)
    Run.objects.filter(pk=made.pk).update(attempt_number=1, kind="generate", spec=spec)
    made.refresh_from_db()
    (rank / "a.txt").write_text("own")
    path = f"runs/{made.pk}/attempt-1/rank-0/a.txt"
    row = runs.artifact_record(run=made, name="a.txt", path=path)
    answer = client.get(f"/api/v1/runs/{made.pk}/artifacts/{row.pk}/download")
    assert answer.status_code == 409 and (rank / "a.txt").is_symlink()
    (rank / ENGINE_SNAPSHOT).write_text("{}")
    assert endpoint.last_snapshot(run=made) is None
    assert (rank / ENGINE_SNAPSHOT).is_symlink()
    output = generated_answers.file_paths(made)[1]
    output.write_text('{"id": 1, "text": "own"}\n')
    answer = client.get(f"/api/v1/runs/{made.pk}/answers")
    assert answer.status_code == 409 and output.is_symlink()
    assert not generated_answers.is_available(made)


def test_a_reported_path_is_in_its_own_run() -> None:
    assert in_run_folder(9, "runs/9/attempt-1/rank-0/a.txt")
    for path in ("runs/99/a", "runs/9/../8/a", "/runs/9/a", "secret_key", "", "runs/9/\0"):
        assert not in_run_folder(9, path), path


def test_the_proxy_calls_the_placed_node_only(owner: User) -> None:
    run = factories.run(owner)
    Run.objects.filter(pk=run.pk).update(state="running", attempt_number=1)
    run.refresh_from_db()
    placement = [{"node": "n1", "address": "10.0.0.7", "devices": [0], "node_rank": 0}]
    Attempt.objects.create(run=run, number=1, state=AttemptState.RUNNING, placement=placement)
    for host in ("10.0.0.7", "0.0.0.0", "169.254.169.254", "localhost", "user@evil.example"):
        data = {"model": "m", "host": host, "port": 8001, "context": 64, "chat": True, "blocks": 8}
        events.record(run=run, new=[events.NewEvent(SERVING, data, attempt=1)])
        assert endpoint.status(run=run).url == "http://10.0.0.7:8001"


def test_names_in_csv_are_no_formulas(owner: User) -> None:
    run, client = factories.external_run(owner), factories.api(owner)
    names = ["=1+1", "@SUM(A1)", "+1", "-1", "loss"]
    values = dict.fromkeys(names, 1.0)
    point = {"seq": 1, "step": 1, "tokens": 64, "time": 1790000000.0, "values": values}
    stored = client.post(f"/api/v1/runs/{run.pk}/points", {"points": [point]}, "application/json")
    assert stored.status_code == 200, stored.content
    table = client.get(f"/api/v1/runs/{run.pk}/series", headers={"Accept": "text/csv"})
    cells = {line.split(",")[0] for line in table.content.decode().splitlines()[1:]}
    assert {f"'{name}" for name in names[:-1]} <= cells
    assert "loss" in cells
    assert not any(cell[:1] in "=@+-" for cell in cells)
