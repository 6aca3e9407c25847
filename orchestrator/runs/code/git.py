"""Reads a git work tree that another user may control: commit, branch, remote, files and diff.

Git runs with an empty configuration of its own and reads only the objects of the repository, so no
filter, hook or monitor of the repository is started. Does not choose which files are kept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

TIMEOUT_S: Final = 20.0
_MOST_NAMES: Final = 16 << 20  # bytes of a list of files
_BIG: Final = "1m"  # larger files are compared as binary ones
_SUBMODULE: Final = "160000"


class GitProblem(ValueError):
    """Why the state of a work tree cannot be recorded."""


@dataclass(frozen=True)
class Repository:
    """A work tree below an allowed folder, and its repository."""

    top: Path
    git_dir: Path
    common: Path  # shared by work trees of one repository


@dataclass(frozen=True)
class GitHead:
    """What is checked out; `commit` is empty before the first one, `branch` if HEAD is detached."""

    commit: str
    branch: str
    remote: str


def find(folder: Path, roots: Sequence[Path]) -> Repository | None:
    """The work tree that contains the folder; None without git. Raises GitProblem."""
    allowed = [Path(os.path.realpath(root)) for root in roots]
    top = Path(os.path.realpath(folder))
    while not os.path.lexists(top / ".git"):
        if top in allowed or not any(top.is_relative_to(root) for root in allowed):
            return None
        top = top.parent
    if not any(top.is_relative_to(root) for root in allowed):
        return None
    if shutil.which("git") is None:
        raise GitProblem("git is not installed on the control plane")
    repository = _repository(top)
    common = repository
    if (repository / "commondir").is_file():
        text = (repository / "commondir").read_text(encoding="utf-8").strip()
        common = Path(os.path.realpath(repository / text))
    for place in (repository, common, *_object_folders(common / "objects", 0)):
        if not any(Path(os.path.realpath(place)).is_relative_to(root) for root in allowed):
            raise GitProblem("its repository is outside the folders that Orrery may read")
    return Repository(top, repository, common)


def head(repository: Repository) -> GitHead:
    """Commit, branch and remote, without credentials. Raises GitProblem."""
    given = [f"--git-dir={repository.git_dir}"]
    branch = _text(given, "symbolic-ref", "-q", "--short", "HEAD", codes=(0, 1))
    commit = _text(given, "rev-parse", "-q", "--verify", "HEAD", codes=(0, 1))
    if commit and not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit):
        raise GitProblem("its HEAD is not a commit")
    listed = _text(
        [],
        *("config", "--file", str(repository.common / "config"), "--no-includes"),
        *("--get-regexp", r"^(remote\..*\.url|branch\..*\.remote)$"),
        codes=(0, 1),
    )
    settings = dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
    chosen = settings.get(f"branch.{branch}.remote", "origin")
    urls = [text for name, text in settings.items() if name.startswith("remote.")]
    remote = settings.get(f"remote.{chosen}.url") or (urls[0] if urls else "")
    return GitHead(commit, branch[:200], without_credentials(remote)[:500])


def without_credentials(remote: str) -> str:
    """The address without user, password, query and fragment; ssh keeps its user."""
    try:
        parts = urlsplit(remote)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    if not parts.scheme or not parts.netloc:
        return remote  # git@host:path, or a folder
    if ":" in host:
        host = f"[{host}]"
    place = f"{host}:{port}" if port else host
    if parts.scheme in ("ssh", "git+ssh") and parts.username:
        place = f"{parts.username}@{place}"
    return urlunsplit((parts.scheme, place, parts.path, "", ""))


@dataclass(frozen=True)
class WorkTree:
    """The open work tree; names are relative to its top."""

    repository: Repository
    commit: str
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def tracked(self) -> tuple[list[str], dict[str, str]]:
        """Names of the commit's files, and `{name: commit}` of its submodules."""
        names, submodules = [], {}
        for entry in self._names("ls-files", "-z", "--stage"):
            facts, _, name = entry.partition("\t")
            mode, object_id = facts.split()[:2]
            if mode == _SUBMODULE:
                submodules[name] = object_id
            else:
                names.append(name)
        return names, submodules

    def untracked(self) -> list[str]:
        """Names of files that are neither in the commit nor ignored."""
        given = ["ls-files", "-z", "--others", "--exclude-standard"]
        exclude = self.repository.common / "info" / "exclude"
        if exclude.is_file():
            given.append(f"--exclude-from={exclude}")
        return [name for name in self._names(*given) if not name.endswith("/")]

    def diff(self, untracked: Sequence[str], limit: int) -> tuple[bytes, str]:
        """The diff from the commit to the files with these new ones, and what it lacks."""
        if untracked:
            names = "\0".join(untracked).encode(errors="surrogateescape")
            given = ("add", "--intent-to-add", "--force", "--pathspec-from-file=-")
            self._run(*given, "--pathspec-file-nul", text=names, limit=1 << 16)
        words = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"]
        words.append("--ignore-submodules=dirty")
        against = [self.commit] if self.commit else []
        whole, complete = self._run(*words, "--binary", *against, "--", limit=limit)
        if complete:
            return whole, ""
        short, complete = self._run(*words, *against, "--", limit=limit)
        if complete:
            return short, "the contents of binary files"
        return short[: short.rfind(b"\n") + 1], f"all after its first {limit >> 10} KiB"

    def _names(self, *words: str) -> list[str]:
        data, complete = self._run(*words, limit=_MOST_NAMES)
        if not complete:
            raise GitProblem("it has too many files")
        return [os.fsdecode(name) for name in data.split(b"\0") if name]

    def _run(self, *words: str, limit: int, text: bytes = b"") -> tuple[bytes, bool]:
        data, code, complete = _output(
            [*self.arguments, *words], self.environment, self.repository.top, text, limit
        )
        if complete and code != 0:
            raise GitProblem(f"git {words[0]} failed")
        return data, complete


@contextmanager
def work_tree(repository: Repository, commit: str) -> Iterator[WorkTree]:
    """Open the work tree at this commit. Raises GitProblem."""
    with tempfile.TemporaryDirectory(prefix="orrery-git-") as name:
        folder = Path(name)
        for each in ("objects/info", "refs", "info"):
            (folder / each).mkdir(parents=True)
        (folder / "HEAD").write_text("ref: refs/heads/none\n")
        version = 1 if len(commit) == 64 else 0
        format_ = "[extensions]\n\tobjectFormat = sha256\n" if version else ""
        (folder / "config").write_text(
            f"[core]\n\trepositoryformatversion = {version}\n\tbare = false\n"
            f"\tbigFileThreshold = {_BIG}\n{format_}"
        )
        objects = os.path.realpath(repository.common / "objects")
        if "\n" in objects or objects.startswith(("#", '"')):
            raise GitProblem("the name of its folder has unusual characters")
        (folder / "objects" / "info" / "alternates").write_text(f"{objects}\n")
        given = (f"--git-dir={folder}", f"--work-tree={repository.top}", "--literal-pathspecs")
        environment = {"GIT_INDEX_FILE": str(folder / "index"), "HOME": name}
        tree = WorkTree(repository, commit, given, environment)
        tree._run("read-tree", *([commit] if commit else ["--empty"]), limit=1 << 16)
        yield tree


def _repository(top: Path) -> Path:
    place = top / ".git"
    if place.is_file() and not place.is_symlink():
        with open(place, encoding="utf-8", errors="replace") as file:
            text = file.read(4096).strip()
        if not text.startswith("gitdir: "):
            raise GitProblem("its .git file names no repository")
        place = top / text.removeprefix("gitdir: ")
    resolved = Path(os.path.realpath(place))
    if not (resolved / "HEAD").exists():
        raise GitProblem("its repository does not exist")
    return resolved


def _object_folders(objects: Path, depth: int) -> Iterator[Path]:
    """The folder of objects, and those that it refers to."""
    yield objects
    listed = objects / "info" / "alternates"
    if depth > 5 or not listed.is_file():
        return
    with open(listed, encoding="utf-8", errors="replace") as file:
        for line in file.read(1 << 16).splitlines():
            if line and not line.startswith("#"):
                yield from _object_folders(objects / line.strip('"'), depth + 1)


def _text(given: Sequence[str], *words: str, codes: Sequence[int]) -> str:
    data, code, complete = _output([*given, *words], {}, Path("/"), b"", 1 << 20)
    if not complete or code not in codes:
        raise GitProblem(f"git {words[0]} failed")
    return data.decode(errors="replace").strip()


def _output(
    arguments: Sequence[str], more: dict[str, str], folder: Path, text: bytes, limit: int
) -> tuple[bytes, int, bool]:
    """`(output, exit code, whether it is complete)`. Raises GitProblem after the time limit."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        **more,
    }
    with tempfile.TemporaryFile() as source:
        source.write(text)
        source.seek(0)
        with subprocess.Popen(
            ["git", "--no-pager", *arguments],
            cwd=folder,
            env=environment,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            expired = threading.Event()

            def expire() -> None:
                expired.set()
                process.kill()

            timer = threading.Timer(TIMEOUT_S, expire)
            timer.start()
            try:
                assert process.stdout is not None
                data = process.stdout.read(limit + 1)
                complete = len(data) <= limit
                if not complete:
                    process.kill()
                code = process.wait()
            finally:
                timer.cancel()
    if expired.is_set():
        raise GitProblem(f"git did not answer within {TIMEOUT_S:g} s")
    return data[:limit], code, complete
