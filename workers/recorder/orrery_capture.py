"""Captures where a program comes from: command, git commit and diff, installed packages.

Standard library only. Values that look like secrets are replaced in the command, the remote and
the diff.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DIFF_BYTES = 1_000_000  # the server's limit
TIMEOUT_S = 20.0  # of one git command
_SECRET = re.compile(r"(?i)(token|secret|password|passwd|api[-_]?key|credential)")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "***"
# a secret's name (not `tokens`, `tokenizer`, `token_ids`) up to its value: `NAME = `, `NAME: `,
# `["NAME"] = `, `"NAME", "`, `--NAME `
_NAMED = re.compile(
    r"(?i)((?:token(?!s|iz|_?id|_?count|_?per)|secret|password|passwd|passphrase|credential"
    r"|(?:api|access|private|account)[-_]?key|authorization)"
    r"[\w-]{0,60}[\"'\])]{0,4}(?:[ \t]{0,20}(?::=|:|=(?![=>]))[ \t]*|[ \t]{0,20},[ \t]*(?=[\"']))"
    r"|(?<![\w-])--[\w-]{0,60}(?:token|secret|password|passwd|api[-_]?key)[ \t]+)(?=\S).*"
)
_KNOWN = re.compile(  # forms of common keys
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|(?i:bearer )\S+"
)
_KEY_BLOCK = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END|\Z)", re.DOTALL)


def capture(folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """`{program, diff, requirements}` of this process; without git only what is known."""
    place = Path(folder) if folder is not None else _program_folder()
    program: dict[str, Any] = {
        "command": safe_command(getattr(sys, "orig_argv", sys.argv)),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "python": platform.python_version(),
    }
    diff = ""
    commit = _git(place, "rev-parse", "--verify", "HEAD")
    if commit is not None:
        program["commit"] = commit.strip()
        branch = (_git(place, "branch", "--show-current") or "").strip()
        remote = (_git(place, "config", "--get", "remote.origin.url") or "").strip()
        program |= {"branch": branch} if branch else {}
        program |= {"remote": _LOGIN.sub("", remote)} if remote else {}
        diff = _git(place, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
        untracked = _git(place, "status", "--porcelain", "--untracked-files=normal") or ""
        program["dirty"] = bool(diff or untracked.strip())
    return {
        "program": program,
        "diff": shortened(without_secrets(diff)),
        "requirements": requirements(),
    }


def safe_command(words: list[str]) -> list[str]:
    """The command without secrets: `--api-key X`, `--token=X` and `TOKEN=X`."""
    result, hide_next = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            word, hide_next = HIDDEN, False
        elif _SECRET.search(name) and equals:
            word = f"{name}={HIDDEN}"
        else:
            hide_next = word.startswith("-") and not equals and bool(_SECRET.search(name))
        result.append(without_secrets(word))
    return result


def without_secrets(text: str) -> str:
    """The text with `***` for values after names of secrets, known forms of keys and logins."""
    text = _KEY_BLOCK.sub(rf"\1 {HIDDEN} -----END", text)
    text = _NAMED.sub(lambda match: match[1] + HIDDEN, text)
    return _LOGIN.sub("", _KNOWN.sub(HIDDEN, text))


def requirements() -> str:
    """The installed packages as `name==version` lines, sorted."""
    lines = {
        f"{package.metadata['Name']}=={package.version}"
        for package in metadata.distributions()
        if package.metadata["Name"]
    }
    return "\n".join(sorted(lines, key=str.lower))


def shortened(diff: str) -> str:
    """The diff cut at a line if it is too long, with a last line that says so."""
    data = diff.encode(errors="replace")
    if len(data) <= DIFF_BYTES:
        return data.decode()
    part = data[: DIFF_BYTES - 200].decode(errors="ignore")
    part = part[: part.rfind("\n") + 1]
    return f"{part}# cut: the diff has {len(data):,} bytes\n"


def _program_folder() -> Path:
    """The folder of the started script, else the current folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it fails. Runs no hooks, pagers or prompts."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
