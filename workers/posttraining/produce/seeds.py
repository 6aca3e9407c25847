"""Reads a file of seed prompts. Does not depend on methods."""

from __future__ import annotations

from pathlib import Path

from workers.contracts.examples.example import LineError
from workers.contracts.examples.seeds import Seed, parse_seed
from workers.runtime.exit_codes import UserError

_LISTED = 10


def read_seeds(path: Path, *, needs_answer: bool = False) -> list[Seed]:
    """All seed prompts. Raises UserError with the numbers of the first lines that are none."""
    seeds, problems, wrong = list[Seed](), list[str](), 0
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise UserError(
            f"produce.seeds: {path} cannot be read: {error.strerror}. Use a file of JSON lines."
        ) from None
    hint = ""
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            seeds.append(parse_seed(text, number, needs_answer=needs_answer))
        except LineError as error:
            wrong += 1
            hint = hint or error.hint
            if len(problems) < _LISTED:
                problems.append(f"line {number} {error.message}")
    if wrong:
        more = f"; and {wrong - len(problems)} more" if wrong > len(problems) else ""
        raise UserError(f"produce.seeds: {path}: {'; '.join(problems)}{more}. {hint}")
    if not seeds:
        raise UserError(f"produce.seeds: {path} has no lines. Use a file with prompts.")
    return seeds
