"""Script runs keep the code of their submit: commit and diff with git, else program files."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from orchestrator.accounts.models import User
from orchestrator.background_jobs import retention
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.runs import bundles
from orchestrator.runs import services as runs
from orchestrator.runs.code import capture as captures
from orchestrator.runs.code import git, record
from orchestrator.runs.code.capture import Captured, capture
from orchestrator.runs.models import Attempt, ProgramSnapshot, Run
from orchestrator.runs.submission.submit import run_submit
from orchestrator.scheduling import dispatch
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def data(settings: Any, tmp_path: Path, live_redis: str) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    settings.DATA_ROOTS = [folder]
    return folder


def in_git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *identity, *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def repository(data: Path) -> Path:
    """A repository with one commit, a change, a new file, data and an ignored folder."""
    top = data / "project"
    (top / "src").mkdir(parents=True)
    (top / "src" / "train.py").write_text("lr = 1\nprint(lr)\n")
    (top / "lib.py").write_text("x = 1\n")
    (top / ".gitignore").write_text("cache/\n")
    in_git(top, "init", "-q")
    in_git(top, "add", ".")
    in_git(top, "commit", "-qm", "first")
    in_git(top, "remote", "add", "origin", "https://ann:hush-4711@git.example.org/lab/project.git")
    (top / "src" / "train.py").write_text("lr = 2\nprint(lr)\n")
    (top / "src" / "new.py").write_text("y = 1\n")
    (top / "tokens.bin").write_bytes(b"\0" * 2000)
    (top / "cache").mkdir()
    (top / "cache" / "old.py").write_text("z = 1\n")
    return top


def captured(folder: Path, data: Path) -> Captured:
    result = capture(str(folder), [data])
    assert result is not None
    return result


def submitted(owner: User, workdir: Path) -> Run:
    script = {"command": ["train.py"], "workdir": str(workdir)}
    return run_submit(owner=owner, name="s", spec={"kind": "script", "script": script})


def test_commit_branch_remote_and_diff_are_recorded(data: Path) -> None:
    top = repository(data)
    code = captured(top / "src", data)
    assert code.git and code.commit == in_git(top, "rev-parse", "HEAD") and code.branch == "main"
    assert code.remote == "https://git.example.org/lab/project.git"
    assert code.folder == str(top) and code.start == "src" and code.notes == []
    assert set(code.files.files) == {".gitignore", "lib.py", "src/new.py", "src/train.py"}
    assert code.originals == ["cache", "tokens.bin"]
    diff = code.diff.decode()
    assert "-lr = 1\n+lr = 2\n" in diff and "+y = 1\n" in diff and "cache" not in diff
    # commit and diff give the same files
    again = data / "again"
    in_git(data, "clone", "-q", str(top), str(again))
    (data / "run.diff").write_bytes(code.diff)
    in_git(again, "apply", str(data / "run.diff"))
    for name, file in code.files.files.items():
        assert (again / name).read_bytes() == file.data
    assert in_git(top, "status", "--porcelain").splitlines() == [  # the index is untouched
        "M src/train.py",
        "?? src/new.py",
        "?? tokens.bin",
    ]


def test_a_detached_head_a_first_commit_and_a_second_work_tree(data: Path) -> None:
    top = repository(data)
    in_git(top, "checkout", "-q", "--detach")
    assert captured(top, data).branch == ""
    in_git(top, "worktree", "add", "-q", str(data / "second"), "-b", "second")
    second = captured(data / "second", data)
    assert second.branch == "second" and second.diff == b"" and second.commit
    empty = data / "empty"
    empty.mkdir()
    in_git(empty, "init", "-q")
    (empty / "a.py").write_text("a = 1\n")
    first = captured(empty, data)
    assert first.commit == "" and first.branch == "main" and b"+a = 1" in first.diff
    assert "no commit yet" in first.notes[0]


def test_programs_of_a_repository_are_not_started(data: Path, tmp_path: Path) -> None:
    top, trace = repository(data), tmp_path / "started"
    touch = f"touch {trace}; cat"
    (top / ".gitattributes").write_text("*.py filter=evil diff=evil\n")
    for name, value in {
        "filter.evil.clean": touch,
        "filter.evil.smudge": touch,
        "diff.evil.textconv": touch,
        "diff.evil.command": touch,
        "core.fsmonitor": touch,
        "core.pager": touch,
        "alias.ls-files": f"!{touch}",
    }.items():
        in_git(top, "config", name, value)
    code = captured(top, data)
    assert code.git and b"+lr = 2" in code.diff and not trace.exists()


def test_a_repository_elsewhere_is_not_read(data: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    secret = repository(private)
    folder = data / "thief"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    (folder / ".git").write_text(f"gitdir: {secret}/.git\n")
    code = captured(folder, data)
    assert not code.git and not code.commit and "outside the folders" in code.notes[0]
    (folder / ".git").unlink()
    in_git(folder, "init", "-q")
    (folder / ".git" / "objects" / "info" / "alternates").write_text(f"{secret}/.git/objects\n")
    assert not captured(folder, data).git
    (folder / ".git" / "objects" / "info" / "alternates").unlink()
    (folder / ".git" / "HEAD").write_text("rubbish")
    broken = captured(folder, data)
    assert not broken.git and "Git was not used" in broken.notes[0]
    assert set(broken.files.files) == {"a.py"}
    assert capture(str(tmp_path), [data]) is None and capture(str(data), [data]) is None


def test_settings_that_may_hold_secrets_are_linked_and_not_stored(data: Path) -> None:
    top, plain = repository(data), data / "plain"
    plain.mkdir()
    secrets = ("credentials.json", "HF_TOKEN.txt", "my-secrets.yaml", ".env")
    for folder in (top, plain):
        for name in (*secrets, "tokenizer.json", "config.json", "read_token.py"):
            (folder / name).write_text("hush-4711")
        code = captured(folder, data)
        assert set(secrets).isdisjoint(code.files.files)
        assert {"tokenizer.json", "config.json", "read_token.py"} <= set(code.files.files)
        assert set(secrets) <= set(code.originals), "attempts on this machine still find them"
    in_git(top, "add", "--force", "credentials.json")
    in_git(top, "commit", "-qm", "second")
    assert "credentials.json" in captured(top, data).files.files, "the commit has it anyway"


def test_odd_files(data: Path) -> None:
    top = repository(data)
    (top / "latin.py").write_bytes("# ä".encode("latin-1"))
    (top / "big.py").write_bytes(b"x" * (1 << 20) + b"y")
    (top / os.fsdecode(b"n\xff.py")).write_text("n = 1\n")
    os.symlink("src/train.py", top / "main.py")
    os.symlink("/etc/hostname", top / "out.py")
    os.mkfifo(top / "pipe.py")
    in_git(top, "add", "big.py")
    code = captured(top, data)
    files = code.files.files
    assert files["latin.py"].data == "# ä".encode("latin-1") and files["latin.py"].base64
    assert files["main.py"].link == "src/train.py"
    assert not {"big.py", "out.py", "pipe.py"} & set(files)
    assert {"big.py", "out.py"} <= set(code.originals)
    notes = " ".join(code.notes)
    assert "big.py" in notes and "out.py is outside the folder" in notes
    (top / "latin.py").unlink()
    in_git(top, "rm", "-q", "-f", "--cached", "big.py")


def test_a_huge_diff_is_cut_and_the_files_are_complete(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = repository(data)
    (top / "more.py").write_text("a = 1\n" * 5000)
    (top / "lib.py").write_bytes(os.urandom(4000))
    monkeypatch.setattr(captures, "MOST_DIFF_BYTES", 3000)
    code = captured(top, data)
    assert 0 < len(code.diff) <= 3000 and code.diff.endswith(b"\n")
    assert "leaves out all after its first 2 KiB" in code.notes[-1]
    assert len(code.files.files["more.py"].data) == 30_000


def test_submodules_are_captured_by_their_files(data: Path) -> None:
    top, inner = repository(data), data / "inner"
    inner.mkdir()
    (inner / "part.py").write_text("p = 1\n")
    in_git(inner, "init", "-q")
    in_git(inner, "add", ".")
    in_git(inner, "commit", "-qm", "inner")
    in_git(top, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    in_git(top, "commit", "-qm", "with a submodule")
    code = captured(top, data)
    assert code.submodules == {"sub": in_git(inner, "rev-parse", "HEAD")}
    assert code.files.files["sub/part.py"].text == "p = 1\n"
    assert "Submodules (sub)" in " ".join(code.notes)


def test_a_slow_git_is_left(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = repository(data)
    monkeypatch.setattr(git, "TIMEOUT_S", 0.0)
    code = captured(top, data)
    assert not code.git and "did not answer within 0 s" in code.notes[0]
    assert "src/train.py" in code.files.files
    monkeypatch.setattr(git.shutil, "which", lambda name: None)
    assert "git is not installed" in captured(top, data).notes[0]


@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://token@example.org:8443/a.git", "https://example.org:8443/a.git"),
        ("https://example.org/a.git?private_token=x", "https://example.org/a.git"),
        ("ssh://git:pw@example.org/a.git", "ssh://git@example.org/a.git"),
        ("git@example.org:a.git", "git@example.org:a.git"),
        ("/srv/a.git", "/srv/a.git"),
        ("https://[broken/a.git", ""),
    ],
)
def test_remotes_show_no_credentials(remote: str, shown: str) -> None:
    assert git.without_credentials(remote) == shown


def test_a_retry_gets_the_code_of_the_submit(owner: User, data: Path) -> None:
    factories.node("n1", devices=2)
    top = repository(data)
    run = submitted(owner, top / "src")
    (top / "src" / "train.py").write_text("lr = 3\n")
    second = submitted(owner, top / "src")
    share = {"node": "n1", "address": "", "devices": [0], "node_rank": 0}
    for each, text in ((run, "lr = 2\nprint(lr)\n"), (second, "lr = 3\n")):
        for number in (1, 2):
            attempt = Attempt.objects.create(run=each, number=number, placement=[share])
            order = dispatch.launch_order(attempt, share, gpu=False)
            assert order.program is not None
            assert order.program.files()["src/train.py"].text == text
            assert order.program.start == "src" and len(order.program.commit) == 40
    assert ProgramSnapshot.objects.count() == 2
    submitted(owner, top / "src")
    assert ProgramSnapshot.objects.count() == 2  # equal programs are stored once


def test_rest_page_and_diff(owner: User, data: Path) -> None:
    top = repository(data)
    (top / "src" / "new.py").write_text("<script>alert(1)</script>\n")
    run = submitted(owner, top / "src")
    answer = factories.api(owner).get(f"/api/v1/runs/{run.pk}/code").json()
    assert answer["git"] and answer["branch"] == "main" and "+lr = 2" in answer["diff"]
    assert "hush-4711" not in str(answer)
    assert next(each["name"] for each in answer["files"]) == ".gitignore"
    browser = factories.client_for(owner)
    page = browser.get(f"/runs/{run.pk}/?tab=code").content.decode()
    assert answer["commit"] in page and '<li class="add">+lr = 2</li>' in page
    assert "<script>alert" not in page and "tokens.bin" in page
    assert "y = 1" not in page
    one = browser.get(f"/runs/{run.pk}/?tab=code&file=src/train.py").content.decode()
    assert "lr = 2\nprint(lr)" in one
    diff = browser.get(f"/runs/{run.pk}/diff/")
    code = record.code_of(run)
    assert code is not None and diff.content == bytes(code.diff)
    plain = data / "plain"
    plain.mkdir()
    (plain / "train.py").write_text("a = 1\n")
    other = submitted(owner, plain)
    page = browser.get(f"/runs/{other.pk}/?tab=code").content.decode()
    assert "not in a git work tree" in page and "Changes since" not in page
    without = run_submit(
        owner=owner, name="w", spec={"kind": "script", "script": {"command": ["true"]}}
    )
    assert "No stored code" in browser.get(f"/runs/{without.pk}/?tab=code").content.decode()
    empty = factories.api(owner).get(f"/api/v1/runs/{without.pk}/code").json()
    assert empty["fingerprint"] is None and empty["files"] == []


def test_a_bundle_has_commit_and_diff(
    owner: User, data: Path, settings: Any, tmp_path: Path
) -> None:
    top = repository(data)
    os.symlink("lib.py", top / "link.py")
    (top / "latin.py").write_bytes(b"\xe4")
    run = submitted(owner, top / "src")
    (top / "lib.py").write_text("changed later\n")
    bundle = bundles.bundle_of(run)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    settings.DATA_ROOTS = [fresh]
    again = bundles.bundle_submit(owner=owner, bundle=bundle)
    before, after = record.code_of(run), record.code_of(again)
    assert before is not None and after is not None
    assert after.snapshot == before.snapshot and after.commit == before.commit
    assert bytes(after.diff) == bytes(before.diff) and after.start == "src"
    folder = Path(again.spec["script"]["workdir"])
    assert folder.is_relative_to(fresh) and (folder / "train.py").read_text().startswith("lr = 2")
    assert (folder.parent / "link.py").read_text() == "x = 1\n"
    for wrong in (
        {"files": {"../evil.py": {"text": ""}}},
        {"files": {"a.py": {"link": "/etc/passwd"}}},
        {"files": {"a": {"text": ""}, "a/b": {"text": ""}}},
        {"files": {"a.py": {"base64": "%"}}},
        {"files": [], "start": ""},
        {**bundle["code"], "fingerprint": "0" * 64},
        {**bundle["code"], "start": "../.."},
    ):
        with pytest.raises(Refusal, match="code"):
            bundles.bundle_submit(owner=owner, bundle={**bundle, "code": wrong})


def test_stored_files_of_old_runs_are_deleted_by_policy_only(
    owner: User, data: Path, settings: Any
) -> None:
    """And the run says so: it cannot be retried or bundled; a new submit stores them again."""
    work = data / "work"
    work.mkdir()
    (work / "train.py").write_text("print('one')")
    run, living = submitted(owner, work), submitted(owner, work)
    runs.run_cancel(run=run, by=owner)
    later = clock.now() + timedelta(days=31)
    options = {"policies": retention.POLICIES, "dry_run": False, "renew": lambda: None}
    assert "programs" not in retention.retain(now=later, **options)
    settings.ENV = settings.ENV.model_copy(update={"retain_programs_days": 30.0})
    assert retention.retain(now=later, **options)["programs"] == 0  # the other run needs it
    runs.run_cancel(run=living, by=owner)
    assert retention.retain(now=later, **{**options, "dry_run": True})["programs"] == 1
    assert retention.retain(now=later, **options)["programs"] == 1
    run.refresh_from_db()
    with pytest.raises(Refusal, match=r"stored code of run .* was deleted"):
        runs.run_retry(run=run, by=owner)
    with pytest.raises(Refusal, match="was deleted"):
        bundles.bundle_of(run)
    page = factories.client_for(owner).get(f"/runs/{run.pk}/?tab=code").content.decode()
    assert "ORRERY_RETAIN_PROGRAMS_DAYS" in page
    rest = factories.api(owner).get(f"/api/v1/runs/{run.pk}/code").json()
    assert rest["files"] == [] and len(rest["fingerprint"]) == 64
    again = submitted(owner, work)
    order = record.program_order(again)
    assert order is not None and order["packed"]


def test_stored_files_stay_if_a_run_needs_them_while_old_ones_are_deleted(
    owner: User, data: Path, settings: Any
) -> None:
    """A submit and a retry make the program new; retention looks again when it deletes."""
    settings.ENV = settings.ENV.model_copy(update={"retain_programs_days": 30.0})
    work = data / "work"
    work.mkdir()
    (work / "train.py").write_text("print('one')")
    run = submitted(owner, work)
    old = clock.now() - timedelta(days=40)
    ProgramSnapshot.objects.update(created=old)
    runs.run_cancel(run=submitted(owner, work), by=owner)
    assert ProgramSnapshot.objects.get().created > old
    runs.run_cancel(run=run, by=owner)
    ProgramSnapshot.objects.update(created=old)
    runs.run_retry(run=run, by=owner)
    assert ProgramSnapshot.objects.get().created > old
    runs.run_cancel(run=run, by=owner)

    later, raced = clock.now() + timedelta(days=31), []

    def meanwhile(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and not raced:
            raced.append(sql)
            ProgramSnapshot.objects.update(created=later)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(meanwhile):
        counts = retention.retain(
            policies=retention.POLICIES, now=later, dry_run=False, renew=lambda: None
        )
    assert raced and counts["programs"] == 0
    assert ProgramSnapshot.objects.get().packed
