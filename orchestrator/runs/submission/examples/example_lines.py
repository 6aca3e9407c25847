"""Checks the first lines of example files for an objective (format, shape, both labels) and of
seed prompts.

Pairs are checked for their common prompt by the parser. Does not depend on tokenizers: templates
are checked when the run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workers.contracts import Problem
from workers.contracts.examples.example import LineError, Shape
from workers.contracts.examples.formats import parse_line
from workers.contracts.examples.prompts import parse_prompt
from workers.contracts.examples.seeds import parse_seed
from workers.contracts.examples.shapes import as_shape
from workers.contracts.specs.data import ExampleFormat

_CHECKED_BYTES = 2**20
_LISTED = 3
_BOM = b"\xef\xbb\xbf"


def example_problems(
    field: str, files: Sequence[Path], format: ExampleFormat, shape: Shape
) -> list[Problem]:
    """Problems of the first lines of all files, up to 1 MiB in total; each names its line."""
    problems: list[Problem] = []
    labels: set[bool | None] = set()
    left, examples, complete = _CHECKED_BYTES, 0, True
    for path in files:
        lines, rest = _first_lines(path, left)
        left -= sum(map(len, lines))
        complete = complete and not rest
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            examples += 1
            try:
                labels |= {each.label for each in as_shape(parse_line(raw, format), shape)}
            except LineError as error:
                message = f"{path.name}, line {number}: {error.message}"
                problems.append(Problem(field=field, message=message, hint=error.hint))
                if len(problems) == _LISTED:
                    return problems
        if left <= 0:
            complete = False
            break
    if not problems and complete and not examples:
        problems.append(
            Problem(field=field, message="has no lines", hint="Use a file with examples.")
        )
    if not problems and complete and shape == "labels" and len(labels) < 2:
        kind = "good" if True in labels else "bad"
        message = f"all {examples} answers are labelled {kind}"
        hint = "Use lines with label true and lines with label false."
        problems.append(Problem(field=field, message=message, hint=hint))
    return problems


def prompt_problems(field: str, files: Sequence[Path], *, needs_answer: bool) -> list[Problem]:
    """Problems of the first lines of files of prompts, up to 1 MiB in total."""
    problems: list[Problem] = []
    left = _CHECKED_BYTES
    for path in files:
        lines, _ = _first_lines(path, left)
        left -= sum(map(len, lines))
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            try:
                parse_prompt(raw, needs_answer=needs_answer)
            except LineError as error:
                message = f"{path.name}, line {number}: {error.message}"
                problems.append(Problem(field=field, message=message, hint=error.hint))
                if len(problems) == _LISTED:
                    return problems
        if left <= 0:
            break
    return problems


def seed_problems(field: str, path: Path, *, needs_answer: bool) -> list[Problem]:
    """Problems of the first MiB of a file of seed prompts; each names its line."""
    lines, more = _first_lines(path, _CHECKED_BYTES)
    problems, prompts = list[Problem](), 0
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            parse_seed(raw, number, needs_answer=needs_answer)
            prompts += 1
        except LineError as error:
            message = f"{path.name}, line {number} {error.message}"
            problems.append(Problem(field=field, message=message, hint=error.hint))
            if len(problems) == _LISTED:
                return problems
    if not problems and not prompts and not more:
        problems.append(
            Problem(field=field, message="has no lines", hint="Use a file with prompts.")
        )
    return problems


def _first_lines(path: Path, most: int) -> tuple[list[bytes], bool]:
    """Complete lines in the first `most` bytes, and whether the file has more."""
    try:
        with open(path, "rb") as file:
            first = file.read(most)
            more = bool(file.read(1))
    except OSError:
        return [], True  # reported by the check of files
    lines = first.removeprefix(_BOM).split(b"\n")
    return (lines[:-1] if more else lines), more
