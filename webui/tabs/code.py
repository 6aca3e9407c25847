"""Code tab of a script run: commit, changes since it, and the program's files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs.code import record
from orchestrator.runs.code.environment import environment_of
from webui.presentation.run_facts import Facts
from webui.tabs.recorded import origin_rows

MOST_LINES: Final = 4000  # of the diff, and of a file, on the page
_LONGEST: Final = 2000  # characters of a line
_OPEN_FILES: Final = 10
_NAME = re.compile(r"^diff --git (?:\"?a/(.+?)\"?) \"?b/")
_REMOTE_PAGE = re.compile(r"https://[A-Za-z0-9.-]+(:\d+)?/[\w./~-]+")


@dataclass
class ChangedFile:
    """The changes of one file: `(kind, text)` of its lines, kind add, del, hunk, meta or none."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    added: int = 0
    removed: int = 0
    is_open: bool = True


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    code, environment = record.code_of(facts.run), environment_of(facts.run)
    if code is None:
        origin = _origin(facts.details) if facts.has_origin else None
        return {
            "code": None,
            "environment": environment,
            "origin": origin,
            "source": facts.source(),
        }
    files = record.files_of(code).files
    changed, cut = changes(record.diff_text(code))
    name = request.GET.get("file", "")
    return {
        "code": code,
        "environment": environment,
        "source": facts.source(),
        "command": _command(facts),
        "remote_page": code.remote if _REMOTE_PAGE.fullmatch(code.remote) else "",
        "gone": record.unusable(facts.run),
        "changed": changed,
        "added": sum(each.added for each in changed),
        "removed": sum(each.removed for each in changed),
        "cut": cut,
        "files": [(each, len(file.data), file.link) for each, file in sorted(files.items())],
        "shown": _shown(name, files.get(name)) if name in files else None,
    }


def _origin(details: Any) -> dict[str, Any]:
    """What an external program recorded about its own code."""
    changed, cut = changes(details.diff)
    return {
        "rows": origin_rows(details.program),
        "changed": changed,
        "added": sum(each.added for each in changed),
        "removed": sum(each.removed for each in changed),
        "cut": cut,
        "diff": details.diff,
        "requirements": details.requirements,
    }


def changes(diff: str) -> tuple[list[ChangedFile], bool]:
    """The files of a diff with their lines, and whether lines beyond the limit are left out."""
    files: list[ChangedFile] = []
    lines = diff.split("\n")
    in_hunk = False
    for line in lines[:MOST_LINES]:
        if (start := _NAME.match(line)) is not None:
            files.append(ChangedFile(start[1], is_open=len(files) < _OPEN_FILES))
            in_hunk = False
        elif files:
            in_hunk = in_hunk or line.startswith("@@")
            _add_line(files[-1], line, in_hunk)
    return files, len(lines) > MOST_LINES


def _add_line(file: ChangedFile, line: str, in_hunk: bool) -> None:
    kind = "meta"
    if in_hunk:
        kind = {"+": "add", "-": "del", "@": "hunk", "\\": "meta"}.get(line[:1], "")
        file.added += kind == "add"
        file.removed += kind == "del"
    elif line.startswith(("index ", "--- ", "+++ ")) or not line:
        return
    file.lines.append((kind, line[:_LONGEST]))


def _shown(name: str, file: Any) -> dict[str, Any]:
    text = file.text if file.text is not None else ""
    lines = text.split("\n")
    return {
        "name": name,
        "link": file.link,
        "is_text": file.text is not None,
        "text": "\n".join(_short(lines)),
        "is_cut": len(lines) > MOST_LINES,
    }


def _short(lines: list[str]) -> Iterator[str]:
    return (line[:_LONGEST] for line in lines[:MOST_LINES])


def _command(facts: Facts) -> str:
    script = facts.run.spec.get("script") or {}
    return " ".join(str(part) for part in script.get("command") or [])
