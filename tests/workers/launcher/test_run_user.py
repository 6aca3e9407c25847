"""Which Unix user a run gets, and the command that starts its programs."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from workers.launcher import command
from workers.launcher.isolation import wrap
from workers.launcher.isolation.acting import as_owner, prepare_folders, run_folder
from workers.launcher.isolation.run_user import FIRST_RUN_GID, FIRST_UID, NoRunUser, RunAs, RunUser
from workers.launcher.rundir import open_to_append, open_to_read, read_json, write_json

OWNER = {"id": 7, "name": "ada"}


def test_a_user_has_the_same_number_everywhere_and_groups_of_its_runs() -> None:
    user = RunAs.parse("uids").user(OWNER, "12", ("9", "12"))
    assert (user.uid, user.gid) == (FIRST_UID + 7, FIRST_UID + 7)
    assert user.groups == (FIRST_RUN_GID + 12, FIRST_RUN_GID + 9)
    assert user.run_gid == FIRST_RUN_GID + 12
    assert RunUser.from_argument(user.to_argument()) == user
    assert RunAs.parse("uids:5000-5010").user(OWNER, "1", ()).uid == 5007


@pytest.mark.parametrize(
    "text", ["root", "uids:10-20", "uids:9-", "uids:9000-8000", "account:", "agent:x", "account:-x"]
)
def test_a_wrong_setting_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(NoRunUser, match=r"uids:FIRST-LAST, account:NAME"):
        RunAs.parse(text)


def test_runs_without_a_user_are_refused() -> None:
    with pytest.raises(NoRunUser, match="beyond the range 5000-5003"):
        RunAs.parse("uids:5000-5003").user(OWNER, "1", ())
    with pytest.raises(NoRunUser, match="does not name the run's owner"):
        RunAs.parse("uids").user(None, "1", ())
    with pytest.raises(NoRunUser, match="no account 'orrery-ada'"):
        RunAs.parse("account:orrery-{user}").user(OWNER, "1", ())
    with pytest.raises(NoRunUser, match="do not execute as root"):
        RunAs.parse("account:root").user(OWNER, "1", ())
    with pytest.raises(NoRunUser, match="no number"):
        RunAs.parse("uids").user(OWNER, "../1", ())


def test_an_account_brings_its_groups() -> None:
    entry = next(item for item in pwd.getpwall() if item.pw_uid != 0)
    user = RunAs.parse(f"account:{entry.pw_name}").user(OWNER, "3", ())
    assert (user.uid, user.name) == (entry.pw_uid, entry.pw_name)
    assert user.groups[0] == FIRST_RUN_GID + 3 and 0 not in user.groups


def test_the_command_gives_up_every_right() -> None:
    user = RunAs.parse("uids").user(OWNER, "12", ("9",))
    started = wrap.as_user(["python", "-c", "pass"], user)
    assert Path(started[0]).name == "setpriv"
    assert started[1:] == [
        f"--reuid={FIRST_UID + 7}",
        f"--regid={FIRST_UID + 7}",
        f"--groups={FIRST_RUN_GID + 12},{FIRST_RUN_GID + 9}",
        "--inh-caps=-all",
        "--no-new-privs",
        "--pdeathsig=KILL",
        "--",
        "python",
        "-c",
        "pass",
    ]


def test_secrets_of_the_agent_reach_runs_only_if_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_TOKEN", "REDIS_URL", "ORRERY_JOIN", "ORRERY_REDIS_CA", "PATH")
    assert [name for name in names if command.may_inherit(name)] == ["PATH"]
    monkeypatch.setenv("ORRERY_RUN_ENV", "OTHER, HF_TOKEN")
    assert command.may_inherit("HF_TOKEN") and not command.may_inherit("REDIS_URL")


def test_links_and_pipes_in_place_of_files_are_not_read_or_written(tmp_path: Path) -> None:
    target = tmp_path / "target.json"
    write_json(target, {"a": 1})
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path / "missing", tmp_path):
        assert read_json(path) == {}
        with pytest.raises(FileNotFoundError):
            open_to_read(path)
    for path in (link, pipe):
        with pytest.raises(OSError):
            open_to_append(path)
    assert read_json(target) == {"a": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_run_folder_is_handed_over_and_used_with_its_owners_rights(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "runs" / "12" / "attempt-1").mkdir(parents=True)
    (home / "runs" / "12" / "attempt-1" / "log").write_text("of an earlier setting")
    (home / "runs" / "12" / "out").symlink_to(tmp_path)
    user = RunAs.parse("uids").user(OWNER, "12", ())
    prepare_folders(home, "12", user)
    for path in (home / "runs" / "12", home / "runs" / "12" / "attempt-1" / "log"):
        assert (path.stat().st_uid, path.stat().st_gid) == (user.uid, user.run_gid)
    assert tmp_path.stat().st_uid == 0  # the link was not followed
    private = home / "private"
    private.write_text("secret")
    private.chmod(0o600)
    run_dir = home / "runs" / "12" / "attempt-1"
    assert run_folder(run_dir) == home / "runs" / "12"
    tmp_path.chmod(0o711)
    for folder in tmp_path.parents[:-1]:
        if folder.stat().st_mode & 0o001 == 0:
            pytest.skip("other users cannot pass the folder of the tests")
    with as_owner(run_dir):
        assert (run_dir / "log").read_text()
        with pytest.raises(PermissionError):
            private.read_text()
    assert private.read_text() == "secret"
