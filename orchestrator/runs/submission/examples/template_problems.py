"""Problems of a run's conversations with its chat template, found when the run is submitted.

The first lines are rendered and encoded as the run's ranks will, in the process of the preview
(`example_preview`), which limits time and memory. Reports nothing where files, tokenizer or
process are not available: then the run itself reports such lines. Does not import templates.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from orchestrator.common.errors import Refusal
from orchestrator.runs.submission.examples.example_preview import preview_of_checked_paths
from workers.contracts import Problem, RunSpec
from workers.contracts.examples.preview import PreviewRequest
from workers.contracts.examples.shapes import needed_shape
from workers.contracts.specs.data import EXAMPLE_FORMATS, SourceSpec

log = logging.getLogger(__name__)
_LINES: Final = 200  # of each source
_LISTED: Final = 3
_BEGINNING: Final = 1 << 16  # bytes that are searched for messages


def template_problems(spec: RunSpec) -> list[Problem]:
    """Lines that the template refuses or drops an answer of, or without a token to train."""
    problems: list[Problem] = []
    for field, source in _conversations(spec):
        request = _request(spec, source)
        if request is None:
            continue
        stamps = tuple(_stamp(path) for path in (request.path, request.tokenizer) if path)
        for line, message in _problems(request.to_json(), stamps):
            problems.append(_problem(spec, field, source, line, message))
            if len(problems) == _LISTED:
                return problems
    return problems


def _conversations(spec: RunSpec) -> Iterator[tuple[str, SourceSpec]]:
    """Sources of examples that a template formats."""
    if spec.train is None or needed_shape(spec.train) is None:
        return
    for field, source in spec.data.parts():
        if source.path is None or source.format not in EXAMPLE_FORMATS:
            continue
        if source.dataset is not None and not os.path.exists(source.path):
            continue  # nodes read it from the store
        if source.format in ("messages", "sharegpt") or _has_messages(Path(source.path)):
            yield field, source


def _has_messages(path: Path) -> bool:
    """Whether prompts or answers of a file, or of a folder's first one, are lists of messages."""
    try:
        if path.is_dir():
            path = min(path.glob("*.jsonl"))
        with open(path, "rb") as file:
            return b'"role"' in file.read(_BEGINNING)
    except (OSError, ValueError):  # a folder without such files
        return False


def _request(spec: RunSpec, source: SourceSpec) -> PreviewRequest | None:
    """The preview of a source as the run reads it; None if its tokenizer is not known here."""
    train = spec.train
    assert train is not None
    tokenizer = spec.data.tokenizer
    if tokenizer is None and train.init_from is not None:
        tokenizer = train.init_from.path
        if tokenizer is None:
            return None
    if not isinstance(tokenizer, str | None):
        return None  # trained when the run starts
    if tokenizer == "bytes":
        tokenizer = None
    if tokenizer is not None and (tokenizer.endswith(".gguf") or not os.path.exists(tokenizer)):
        return None
    options = getattr(train, train.objective, None)
    return PreviewRequest(
        path=str(source.path),
        format=source.format,
        tokenizer=tokenizer,
        template=getattr(options, "template", None),
        seq_len=min(train.seq_len, 1_000_000),
        packing=getattr(options, "packing", True),
        train_on=getattr(options, "train_on", "completion"),
        lines=_LINES,
        samples=1,
    )


@lru_cache(maxsize=64)
def _problems(request: str, stamps: tuple[Any, ...]) -> tuple[tuple[int | None, str], ...]:
    """`(line, message)`; `stamps` change with the files."""
    try:
        answer = preview_of_checked_paths(PreviewRequest.model_validate_json(request))
    except Refusal as refusal:
        if refusal.status == 422 and refusal.errors:
            return tuple((None, str(error["message"])) for error in refusal.errors)
        log.warning("the template of a run was not checked: %s", refusal.detail)
        return ()
    return tuple(
        (each["line"], str(each["message"]))
        for each in answer["problems"]
        # what holds for all lines that were read need not hold for the others
        if each["line"] is not None or answer["complete"]
    )


def _stamp(path: str) -> tuple[str, int, int] | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return path, stat.st_mtime_ns, stat.st_size


def _problem(
    spec: RunSpec, field: str, source: SourceSpec, line: int | None, message: str
) -> Problem:
    """One problem: at the template if the spec gives one and that is wrong, else at the data."""
    assert spec.train is not None
    objective = spec.train.objective
    options = getattr(spec.train, objective, None)
    given = getattr(options, "template", None) is not None
    of_template = given and "chat template" in message
    text, hint = _split_hint(message)
    place = f"{Path(str(source.path)).name}, line {line}: " if line is not None else ""
    return Problem(
        field=f"train.{objective}.template" if of_template else f"{field}.path",
        message=place + text.removeprefix("data.path: ").removeprefix("data: "),
        hint=hint or "Use a line that the chat template renders.",
    )


def _split_hint(message: str) -> tuple[str, str]:
    """`(message, hint)` of an error's text, which ends in `. Hint.` or `; hint`."""
    separator = ". " if message.endswith(".") and ". " in message else "; "
    text, _, hint = message.rpartition(separator)
    if not text:
        return message, ""
    return text, f"{hint[:1].upper()}{hint[1:].rstrip('.')}."
