"""Example files line by line: every line becomes examples or a listed problem, none is skipped.

Does not depend on tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workers.contracts.examples.example import Example, LineError, Shape
from workers.contracts.examples.formats import parse_line
from workers.contracts.examples.shapes import as_shape
from workers.contracts.specs.data import ExampleFormat
from workers.runtime.exit_codes import UserError
from workers.training.data.files import BOM

LISTED = 10  # problems that an error lists
_MOST = 1000  # problems after which reading ends


@dataclass(slots=True)
class LineProblems:
    """Problems of lines: the first LISTED are kept, all are counted."""

    listed: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, where: str, message: str) -> None:
        """Count a problem. Raises UserError after too many."""
        self.count += 1
        if len(self.listed) < LISTED:
            self.listed.append(f"{where}: {message}")
        if self.count >= _MOST:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises UserError that lists the first problems and counts the others."""
        if not self.count:
            return
        more = self.count - len(self.listed)
        others = f"\n… and {more}{' or more' * (self.count >= _MOST)} other lines" if more else ""
        raise UserError("data.path: " + "\n".join(self.listed) + others)


@dataclass(frozen=True, slots=True)
class Line:
    """One line's place, its examples, and what is wrong with it (then it has none)."""

    path: Path
    number: int
    examples: tuple[Example, ...] = ()
    problem: str = ""

    @property
    def where(self) -> str:
        """The file and the line's number, from 1."""
        return f"{self.path}: line {self.number}"


def read_lines(
    files: Sequence[Path], format_: ExampleFormat, *, shape: Shape | None = None
) -> Iterator[Line]:
    """Every line that is not blank; with `shape` converted to it, or with a problem."""
    for path in files:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.removeprefix(BOM) if number == 1 else raw
                if not text.strip():
                    continue
                try:
                    example = parse_line(text, format_)
                    examples = [example] if shape is None else as_shape(example, shape)
                except LineError as error:
                    yield Line(path, number, problem=str(error))
                else:
                    yield Line(path, number, tuple(examples))


def example_texts(files: Sequence[Path], format_: ExampleFormat) -> Iterator[str]:
    """The texts of all lines, to train a tokenizer. Raises UserError for lines with problems."""
    problems = LineProblems()
    for line in read_lines(files, format_):
        if line.problem:
            problems.add(line.where, line.problem)
        for example in line.examples:
            for text in example.texts:
                yield from text.texts()
    problems.raise_if_any()
