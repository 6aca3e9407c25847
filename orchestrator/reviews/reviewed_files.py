"""Writes decisions and votes to files that runs read, each line with who decided and when.

A file is written once and never changed. Does not decide anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from django.conf import settings
from django.db import IntegrityError, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, conflict, invalid, missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.reviews import source
from orchestrator.reviews.models import LineReview, ModelComparison, Review, ReviewedFile

Writes = Literal["lines", "edits_as_pairs"]
FOLDER: Final = "reviewed"
_CHUNK: Final = 500  # decisions per query
_TRIES: Final = 20  # names, while other requests take them


def review_write(
    *,
    review: Review,
    by: User,
    writes: Writes = "lines",
    undecided: Literal["keep", "drop"] = "drop",
    min_rating: int | None = None,
) -> ReviewedFile:
    """Write the kept lines as they now are, or each edit as a preference pair.

    Of pairs, `swap` exchanges chosen and rejected. `min_rating` leaves out lines with a lower
    rating or none. Raises 403, 409 without a line to write, 422.
    """
    accounts.require_role(by, Role.SUBMITTER, "write reviewed files")
    if writes == "edits_as_pairs" and review.format not in ("messages", "prompt_completion"):
        raise invalid(
            "writes",
            f"format {review.format} has no single answer per line",
            "Use writes lines.",
            type="invalid",
        )
    lines = (
        _edits_as_pairs(review, min_rating)
        if writes == "edits_as_pairs"
        else _retained(review, undecided, min_rating)
    )
    options = {"writes": writes, "undecided": undecided, "min_rating": min_rating}
    return _write(
        by=by,
        name=review.name,
        format="preference" if writes == "edits_as_pairs" else review.format,
        lines=lines,
        options=options,
        review=review,
    )


def votes_write(*, comparison: ModelComparison, by: User, lines: Iterable[Any]) -> ReviewedFile:
    """Write the votes of a comparison as preference pairs. Raises 403, 409 without one."""
    accounts.require_role(by, Role.SUBMITTER, "write reviewed files")
    name = " vs ".join(map(str, comparison.model_ids))
    return _write(
        by=by, name=name, format="preference", lines=lines, options={}, comparison=comparison
    )


def file_of(*, review: Review, id: int) -> Path:
    """The path of a reviewed file of this review. Raises 404, 409 if it is on another machine."""
    row = ReviewedFile.objects.filter(review=review, pk=id).first() if is_id(id) else None
    if row is None:
        raise missing_object("reviewed file", id)
    path = Path(row.path)
    if not path.is_file():
        raise conflict(f"{path} is not on this machine, or was deleted.", type="file-elsewhere")
    return path


def _retained(review: Review, undecided: str, min_rating: int | None) -> Iterator[dict[str, Any]]:
    for number, original, row in _reviewed(review):
        decision = (row.decision if row is not None else "") or undecided
        if decision == "drop" or not _rated(row, min_rating):
            continue
        content = row.edited if row is not None and row.edited is not None else original
        if decision == "swap":
            content = {**content, "chosen": content["rejected"], "rejected": content["chosen"]}
        yield {**content, "review": _lineage(review, number, row)}


def _edits_as_pairs(review: Review, min_rating: int | None) -> Iterator[dict[str, Any]]:
    """Edited answers as chosen and the originals as rejected, for edits that changed only those."""
    for number, original, row in _reviewed(review):
        if row is None or row.edited is None or row.decision == "drop":
            continue
        if not _rated(row, min_rating):
            continue
        pair = _pair(original, row.edited)
        if pair is not None:
            yield {**pair, "review": _lineage(review, number, row)}


def _pair(original: dict[str, Any], edited: dict[str, Any]) -> dict[str, Any] | None:
    if "messages" in original and "messages" in edited:
        *prompt, answer = original["messages"]
        *same, better = edited["messages"]
        if prompt != same or answer == better:
            return None
        return {"prompt": prompt, "chosen": [better], "rejected": [answer]}
    if original.get("prompt") != edited.get("prompt"):
        return None
    if original.get("completion") == edited.get("completion"):
        return None
    return {
        "prompt": original.get("prompt"),
        "chosen": edited.get("completion"),
        "rejected": original.get("completion"),
    }


def _reviewed(review: Review) -> Iterator[tuple[int, dict[str, Any], LineReview | None]]:
    """All lines with their decisions, a few hundred per query."""
    waiting: list[tuple[int, dict[str, Any]]] = []

    def joined() -> Iterator[tuple[int, dict[str, Any], LineReview | None]]:
        numbers = [number for number, _ in waiting]
        rows = {
            row.line: row
            for row in LineReview.objects.filter(
                review=review, line__gte=numbers[0], line__lte=numbers[-1]
            )
        }
        for number, content in waiting:
            yield number, content, rows.get(number)

    for item in source.all_lines(review):
        waiting.append(item)
        if len(waiting) == _CHUNK:
            yield from joined()
            waiting.clear()
    if waiting:
        yield from joined()


def _rated(row: LineReview | None, least: int | None) -> bool:
    return least is None or (row is not None and row.rating is not None and row.rating >= least)


def _lineage(review: Review, number: int, row: LineReview | None) -> dict[str, Any]:
    return {
        "review": review.pk,
        "source": review.source,
        "sha256": review.sha256,
        "line": number,
        "decision": row.decision if row is not None else "",
        "rating": row.rating if row is not None else None,
        "edited": row is not None and row.edited is not None,
        "version": row.version if row is not None else 0,
        "by": row.by if row is not None else None,
        "time": iso(row.time) if row is not None else None,
    }


def _write(
    *,
    by: User,
    name: str,
    format: str,
    lines: Iterable[dict[str, Any]],
    options: dict[str, Any],
    review: Review | None = None,
    comparison: ModelComparison | None = None,
) -> ReviewedFile:
    if not settings.DATA_ROOTS:
        raise conflict("There is no data folder. Set ORRERY_DATA_ROOTS.", type="no-data-root")
    folder = Path(settings.DATA_ROOTS[0]) / FOLDER
    partial = folder / f".{os.getpid()}-{os.urandom(6).hex()}"
    digest, count, size = hashlib.sha256(), 0, 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            for line in lines:
                # half of a surrogate pair, which JSON can escape, has no UTF-8
                text = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                digest.update(text)
                file.write(text)
                count, size = count + 1, size + len(text)
            file.flush()
            os.fsync(file.fileno())
        if not count:
            raise conflict(
                "No line has such a decision yet, so the file would be empty.",
                type="nothing-decided",
            )
        row = ReviewedFile(
            review=review,
            comparison=comparison,
            format=format,
            lines=count,
            bytes=size,
            sha256=digest.hexdigest(),
            by=by.username,
            created=clock.now(),
            options=options,
        )
        _store(row, partial, folder, name, by)
    except OSError as error:
        raise _not_written(folder, error) from None
    finally:
        with suppress(OSError):
            partial.unlink()
    return row


def _store(row: ReviewedFile, partial: Path, folder: Path, name: str, by: User) -> None:
    """Give the written file a free name and store its row; another request may take the name."""
    for attempt in range(_TRIES):
        path = _free_path(folder, name)
        row.pk, row.path = None, str(path)
        data = {"path": row.path, "lines": row.lines, **row.options}
        try:
            with transaction.atomic():
                row.save(force_insert=True)
                accounts.audit(
                    actor=by, action="data_set.create", target=f"data_set:{row.pk}", data=data
                )
                os.link(partial, path)  # never replaces a file
            return
        except (FileExistsError, IntegrityError):
            if attempt == _TRIES - 1:
                raise


def _not_written(folder: Path, error: OSError) -> Refusal:
    reason = error.strerror or str(error)
    hint = (
        "Use a first folder of ORRERY_DATA_ROOTS that is writable, has space and allows hard links."
    )
    return Refusal(
        "data-set-not-written",
        "The reviewed file cannot be written",
        409,
        f"{folder} cannot be written: {reason}.",
        [{"field": "", "message": reason, "hint": hint}],
    )


def _free_path(folder: Path, name: str) -> Path:
    """`NAME.jsonl`, or the first free `NAME-2.jsonl`, …"""
    stem = re.sub(r"[^\w.-]+", "-", name.removesuffix(".jsonl")).strip("-.")[:80] or "reviewed"
    number = 1
    while True:
        path = folder / (f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl")
        if not path.exists() and not ReviewedFile.objects.filter(path=str(path)).exists():
            return path
        number += 1
