"""A link that replaces a file between the check and the opening leads nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.common.checked_files import open_resolved, resolved_below


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a file, next to a secret."""
    folder = tmp_path / "runs" / "1"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "out.txt").write_text("own")
    (folder / "latest").symlink_to("a")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "out.txt").write_text("secret")
    return folder


def test_links_within_the_folder_are_followed_and_others_are_not(run: Path) -> None:
    resolved = resolved_below(run / "latest" / "b" / "out.txt", run)
    assert resolved is not None
    with open_resolved(resolved) as file:
        assert file.read() == b"own"
    (run / "out").symlink_to("../../secret/out.txt")
    assert resolved_below(run / "out", run) is None
    assert resolved_below(run / ".." / ".." / "secret" / "out.txt", run) is None
    assert resolved_below(run / "nul\0", run) is None


@pytest.mark.parametrize("what", ["the file", "its folder", "a folder above"])
def test_a_link_that_is_put_there_after_the_check_is_refused(run: Path, what: str) -> None:
    resolved = resolved_below(run / "a" / "b" / "out.txt", run)
    assert resolved is not None
    path, target = {
        "the file": (resolved, run.parent.parent / "secret" / "out.txt"),
        "its folder": (resolved.parent, run.parent.parent / "secret"),
        "a folder above": (resolved.parent.parent, run.parent.parent),
    }[what]
    path.rename(run / "moved")
    path.symlink_to(target)
    with pytest.raises(FileNotFoundError):
        open_resolved(resolved)


def test_a_pipe_neither_blocks_nor_is_read(run: Path) -> None:
    os.mkfifo(run / "pipe")
    resolved = resolved_below(run / "pipe", run)
    assert resolved is not None
    with pytest.raises(FileNotFoundError):
        open_resolved(resolved)
