"""Commands through the real REST API: what they print, their JSON, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orrery_cli import client as rest
from orrery_cli import credentials
from orrery_cli.commands import download
from orrery_cli.errors import Refused

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from tests import factories
from tests.cli.conftest import URL, Orrery


def lines_sent(run: str, *texts: str) -> None:
    """Log lines of an external run, by REST."""
    items = [
        {"rank": 0, "seq": seq, "time": 1.0, "text": text} for seq, text in enumerate(texts, 1)
    ]
    with rest.Client() as client:
        client.post(f"runs/{run}/logs", {"lines": items})


def test_flags_make_a_run_that_the_list_shows(orrery: Orrery) -> None:
    made = orrery(
        *("submit", "--model", "llama-tiny", "--steps", 20, "--devices", 2, "--tag", "a"),
        *("--set", "train.optimizer.lr=0.01", "--name", "first", "--json"),
    )
    assert made.code == 0, made.err
    run = json.loads(made.out)
    assert run["name"] == "first" and run["tags"] == ["a"] and run["devices"] == 2
    assert run["spec"]["train"]["optimizer"]["lr"] == 0.01
    assert run["plan"]["dp"] * run["plan"]["tp"] * run["plan"]["pp"] == 2, "the planner chose it"
    listed = orrery("runs", "--state", "queued", "--owner", "me")
    assert listed.code == 0 and "first" in listed.out and "llama-tiny" in listed.out
    assert orrery("runs", "-q", "nothing has this").out.startswith("No runs.")
    [row] = json.loads(orrery("runs", "--json").out)["items"]
    assert row["id"] == run["id"]


def test_a_spec_file_and_flags_that_replace_its_fields(orrery: Orrery, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(factories.spec(devices=2)))
    made = orrery("submit", path, "--steps", 7, "--plan", "dp=1,micro_batch_size=4", "--json")
    run = json.loads(made.out)
    assert run["spec"]["train"] == {"steps": 7, "seq_len": 64}
    assert run["plan"]["dp"] == 1 and run["plan"]["micro_batch_size"] == 4
    path.write_text(json.dumps({"name": "whole", "spec": factories.spec()}))
    assert "run" in orrery("submit", path).out
    assert Run.objects.filter(name="whole").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["submit"], 2, "nothing to submit"),
        (["submit", "missing.json"], 2, "cannot read missing.json"),
        (["submit", "--steps", "many"], 2, "steps"),
        (["submit", "--set", "train.steps", "--model", "llama-tiny"], 2, "FIELD=VALUE"),
        (["submit", "--model", "llama-tony", "--steps", "2"], 1, "model: "),
        (["submit", "--steps", "2", "--set", "train.stps=1"], 1, "train.stps"),
        (["watch", "x"], 2, "run"),
        (["cancel", "999"], 1, "There is no run 999"),
        (["download", "999"], 1, "There is no run 999"),
        (["unknown"], 2, "unknown"),
        (["--url", "localhost", "runs"], 2, "http://"),
        (["plan", "--model", "llama-tony"], 1, "model"),
    ],
)
def test_wrong_input_is_refused_with_a_message(
    orrery: Orrery, arguments: list[str], code: int, words: str
) -> None:
    refused = orrery(*arguments)
    assert refused.code == code and words in refused.err, refused
    assert refused.out == "" and not Run.objects.exists()


def test_errors_with_json_are_problem_details(orrery: Orrery) -> None:
    refused = orrery("cancel", 999, "--json")
    assert refused.code == 1 and refused.out == ""
    assert json.loads(refused.err)["type"].endswith("/not-found")


def test_cancel_compare_queue_and_nodes(orrery: Orrery, owner: User) -> None:
    factories.node("worker-a", devices=2)
    first, second = factories.run(owner, name="one"), factories.run(owner, name="two", devices=2)
    compared = orrery("compare", first.pk, second.pk)
    assert "spec.plan.dp" in compared.out and "spec.train.steps" not in compared.out
    document = json.loads(orrery("compare", first.pk, second.pk, "--json").out)
    assert document["differences"]["plan.dp"] == [1, 2]
    waiting = orrery("queue")
    assert waiting.out.index("one") < waiting.out.index("two"), waiting
    assert "worker-a" in orrery("nodes").out and "2 × cpu" in orrery("nodes").out
    assert orrery("cancel", first.pk, second.pk).out.count("cancelled") == 2
    assert orrery("queue").out == "No run waits.\n"
    assert json.loads(orrery("queue", "--json").out) == {"items": []}


def test_plan_lists_the_best_plans(orrery: Orrery) -> None:
    command = ("plan", "--model", "llama3-8b", "--device", "h100-80g", "--fix", "tp=2", "--top", 3)
    shown = orrery(*command)
    assert shown.code == 0 and "tp2" in shown.out and "legal plans" in shown.out
    answer = json.loads(orrery(*command, "--json").out)
    assert len(answer["plans"]) == 3 and all(each["plan"]["tp"] == 2 for each in answer["plans"])


def test_logs_of_an_external_run(orrery: Orrery) -> None:
    run = json.loads(orrery("submit", "--kind", "external", "--json").out)["id"]
    lines_sent(run, "one", "two", "three")
    assert orrery("logs", run).out == "rank 0: one\nrank 0: two\nrank 0: three\n"
    assert orrery("logs", run, "--tail", 1).out == "rank 0: three\n"
    assert orrery("logs", run, "-q", "tw").out == "rank 0: two\n"
    rows = [json.loads(line) for line in orrery("logs", run, "--json").out.splitlines()]
    assert [row["text"] for row in rows] == ["one", "two", "three"]


def test_logs_follow_to_the_end_of_the_run(orrery: Orrery, monkeypatch: pytest.MonkeyPatch) -> None:
    run = json.loads(orrery("submit", "--kind", "external", "--json").out)["id"]
    lines_sent(run, "one")
    actions: list[Any] = [
        lambda: lines_sent(run, "one", "two"),
        lambda: runs.run_cancel(run=Run.objects.get(pk=run), by=Run.objects.get(pk=run).owner),
    ]
    monkeypatch.setattr("orrery_cli.commands.logs.time.sleep", lambda s: actions.pop(0)())
    assert orrery("logs", run, "-f").out == "rank 0: one\nrank 0: two\n"


def test_logs_follow_continues_with_a_token_that_a_login_stores(
    orrery: Orrery, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `watch` read the stored token again."""
    run = json.loads(orrery("submit", "--kind", "external", "--json").out)["id"]
    lines_sent(run, "one")
    old, first = accounts.token_create(user=owner, name="first", by=owner)
    _, second = accounts.token_create(user=owner, name="second", by=owner)
    monkeypatch.delenv("ORRERY_TOKEN")
    credentials.store(URL, first)

    def replaced() -> None:
        accounts.token_revoke(token=old, by=owner)
        credentials.store(URL, second)

    actions: list[Any] = [
        replaced,
        lambda: lines_sent(run, "one", "two"),
        lambda: runs.run_cancel(run=Run.objects.get(pk=run), by=owner),
    ]
    monkeypatch.setattr("orrery_cli.commands.logs.time.sleep", lambda s: actions.pop(0)())
    assert orrery("logs", run, "-f").out == "rank 0: one\nrank 0: two\n"

    credentials.store(URL, first)
    refused = orrery("logs", run)
    assert refused.code == 1 and "orrery login" in refused.err


def test_download_writes_whole_files_only(
    orrery: Orrery, owner: User, tmp_path: Path, settings: Any
) -> None:
    run = factories.run(owner)
    folder = settings.ENV.media_runs / str(run.pk)
    folder.mkdir(parents=True, exist_ok=True)  # other tests share the home
    for name in ("answers.jsonl", "profile.json"):
        (folder / name).write_bytes(b"x" * 1000)
        runs.artifact_record(run=run, name=name, path=str(folder / name), bytes=1000)
    listed = json.loads(orrery("download", run.pk, "--list", "--json").out)["items"]
    assert [row["name"] for row in listed] == ["answers.jsonl", "profile.json"]
    out = tmp_path / "out"
    shown = orrery("download", run.pk, "answers.jsonl", "-o", out)
    assert shown.code == 0, shown.err
    assert [path.name for path in out.iterdir()] == ["answers.jsonl"]
    assert (out / "answers.jsonl").read_bytes() == b"x" * 1000
    refused = orrery("download", run.pk, "other", "-o", out)
    assert refused.code == 1 and "Choose one of answers.jsonl, profile.json." in refused.err
    (folder / "profile.json").unlink()
    failed = orrery("download", run.pk, "-o", out)
    assert failed.code == 1 and "is not on this machine" in failed.err
    assert [path.name for path in out.iterdir()] == ["answers.jsonl"]
    assert orrery("download", run.pk, "--bundle", "-o", out).code == 0
    assert json.loads((out / f"run-{run.pk}-bundle.json").read_text())["spec"]["kind"] == "train"


def test_a_download_continues_with_a_token_that_a_login_stores(
    orrery: Orrery, owner: User, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was requested with the old token only."""
    run = factories.run(owner)
    folder = settings.ENV.media_runs / str(run.pk)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "answers.jsonl").write_bytes(b"x" * 1000)
    runs.artifact_record(
        run=run, name="answers.jsonl", path=str(folder / "answers.jsonl"), bytes=1000
    )
    old, first = accounts.token_create(user=owner, name="first", by=owner)
    _, second = accounts.token_create(user=owner, name="second", by=owner)
    monkeypatch.delenv("ORRERY_TOKEN")
    credentials.store(URL, first)
    original = download._artifacts

    def replaced_afterwards(*arguments: Any) -> Any:
        rows = original(*arguments)
        accounts.token_revoke(token=old, by=owner)
        credentials.store(URL, second)
        return rows

    monkeypatch.setattr(download, "_artifacts", replaced_afterwards)
    out = tmp_path / "out"
    shown = orrery("download", run.pk, "-o", out)
    assert shown.code == 0, shown.err
    assert [path.name for path in out.iterdir()] == ["answers.jsonl"]

    credentials.store(URL, first)
    stored = tmp_path / "none"
    with rest.Client() as client:
        path = f"runs/{run.pk}/artifacts/{run.artifacts.get().pk}/download"
        with pytest.raises(Refused) as refused:
            download._file(client, path, stored / "answers.jsonl")
    assert refused.value.slug == "token-revoked" and list(stored.iterdir()) == []


def test_a_logout_elsewhere_repeats_nothing_without_a_token(
    orrery: Orrery, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second refusal was about a request without a token."""
    token, text = accounts.token_create(user=owner, name="first", by=owner)
    monkeypatch.delenv("ORRERY_TOKEN")
    credentials.store(URL, text)
    with rest.Client() as client:
        client.get("runs")
        accounts.token_revoke(token=token, by=owner)
        credentials.store(URL, None)
        for request in (lambda: client.get("runs"), lambda: client.stream("runs").__enter__()):
            with pytest.raises(Refused) as refused:
                request()
            assert refused.value.slug == "token-revoked" and client.token == text


def test_ids_of_runs_are_completed(orrery: Orrery, owner: User) -> None:
    from orrery_cli.options import complete_run

    run = factories.run(owner, name="mine")
    assert complete_run("") == [(str(run.pk), "queued mine")]
    assert complete_run("x") == []
