"""The command `python -m workers.training.data.examples.preview`: a file as the model sees it.

Reads a request as JSON from stdin, writes the preview as JSON to stdout. Reads the first lines
only, so that the answer comes in seconds. Does not depend on a run.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.contracts.examples.example import Example, Shape
from workers.contracts.examples.formats import guess_format
from workers.contracts.examples.preview import PreviewRequest
from workers.contracts.specs.data import ExampleFormat
from workers.models.errors import WeightsError
from workers.models.text.chat_format import ChatFormat, EncodedText, open_chat_format
from workers.runtime.exit_codes import CODES, UserError
from workers.training.data.examples.encoding import common_prompt, encode_example
from workers.training.data.examples.preview_texts import describe_example, length_histogram
from workers.training.data.examples.reading import LISTED, Line, read_lines
from workers.training.data.examples.rows import placed_lengths
from workers.training.data.examples.samples import ExampleSamples, ExampleSource
from workers.training.data.examples.store import Store, StoreWriter
from workers.training.data.files import list_files

MOST_SECONDS = 15.0
MOST_CPU_SECONDS = 60
MOST_ADDRESS_SPACE = 8 << 30  # a template may ask for any amount
ROWS_SHOWN = 16


@dataclass(slots=True)
class _Read:
    """What was read: encoded lines with their examples, problems, and lines by their text."""

    writer: StoreWriter = field(default_factory=StoreWriter)
    shown: list[tuple[Line, Example, tuple[EncodedText, ...]]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    problem_count: int = 0
    lines: int = 0
    complete: bool = True
    equal: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


def preview(request: PreviewRequest) -> dict[str, Any]:
    """The preview's data. Raises UserError for a file or tokenizer that cannot be read."""
    path = Path(request.path)
    format_ = request.format or _guess(path)
    files = list_files(path, format_)
    chat = _open_chat(request)
    read, shape = _read(files, format_, request, chat)
    store = read.writer.store()
    answer: dict[str, Any] = {
        "format": format_,
        "shape": shape,
        "lines": read.lines,
        "complete": read.complete,
        "problem_count": read.problem_count,
        "problems": read.problems,
        "template": chat.template,
        "stops": [chat.decode([stop]) for stop in chat.stops],
        "duplicates": _duplicates(read),
        "samples": [],
        "statistics": None,
        "histogram": None,
        "rows": [],
    }
    if not len(store):
        return answer
    limits = placed_lengths(store, shape, request.seq_len)
    answer["samples"] = [
        describe_example(line.number, example, documents, limits[number], chat)
        for number, (line, example, documents) in enumerate(read.shown)
    ]
    answer["histogram"] = length_histogram(store, request.seq_len)
    try:
        rows = ExampleSamples(
            [ExampleSource(path.name, store, 0, len(store))],
            shape=shape,
            seq_len=request.seq_len,
            packing=request.packing,
            seed=0,
            shuffle=False,
        )
    except UserError as error:
        answer["problems"].append({"line": None, "message": str(error)})
        return answer
    answer["statistics"] = rows.statistics[path.name].to_dict()
    answer["rows"] = [_row(rows, index, store) for index in range(min(ROWS_SHOWN, rows.windows))]
    return answer


def _guess(path: Path) -> ExampleFormat:
    """The format of the first line. Raises UserError if it has the fields of none."""
    [file, *_] = list_files(path, "messages")
    with open(file, "rb") as opened:
        first = next((line for line in opened if line.strip()), b"")
    format_ = guess_format(first.removeprefix(b"\xef\xbb\xbf"))
    if format_ is None:
        raise UserError(
            f"data.path: {file.name}: line 1 has the fields of no example format. Use a line "
            'such as {"prompt": "…", "completion": "…"}.'
        )
    return format_


def _open_chat(request: PreviewRequest) -> ChatFormat:
    try:
        where = Path(request.tokenizer) if request.tokenizer else Path("/nonexistent")
        return open_chat_format(
            where.parent if where.is_file() else where, template=request.template
        )
    except WeightsError as error:
        raise UserError(f"data.tokenizer: {error}") from None


def _read(
    files: Sequence[Path], format_: ExampleFormat, request: PreviewRequest, chat: ChatFormat
) -> tuple[_Read, Shape]:
    read, end = _Read(), time.monotonic() + MOST_SECONDS
    shape: Shape | None = None
    for line in _limited(read_lines(files, format_), request.lines, end, read):
        problem = line.problem
        for example in line.examples:
            shape = shape or example.shape
            try:
                if example.shape != shape:
                    raise WeightsError(f"is an example of {example.shape}, others are {shape}")
                documents = encode_example(example, chat, train_on=request.train_on_for(shape))
            except WeightsError as error:
                problem = str(error)
                continue
            if shape == "pairs" and not common_prompt(documents):
                problem = "the prompts of chosen and rejected have other tokens"
                continue
            read.writer.add(documents, label=example.label, margin=example.margin, line=line.number)
            read.equal["\0".join(text for each in example.texts for text in each.texts())].append(
                line.number
            )
            if len(read.shown) < request.samples:
                read.shown.append((line, example, documents))
        if problem:
            read.problem_count += 1
            if len(read.problems) < LISTED:
                read.problems.append({"line": line.number, "message": problem})
    return read, shape or "answers"


def _limited(lines: Iterator[Line], most: int, end: float, read: _Read) -> Iterator[Line]:
    for line in lines:
        if read.lines >= most or time.monotonic() > end:
            read.complete = False
            return
        read.lines += 1
        yield line


def _duplicates(read: _Read) -> dict[str, Any]:
    groups = [numbers for numbers in read.equal.values() if len(numbers) > 1]
    return {
        "lines": sum(len(numbers) - 1 for numbers in groups),
        "groups": [numbers[:10] for numbers in groups[:LISTED]],
    }


def _row(rows: ExampleSamples, index: int, store: Store) -> list[dict[str, int]]:
    """The documents of a row: line, tokens, tokens with loss."""
    row = rows.row(index)
    bounds = [*row.starts, len(row.weights)]
    lines = [
        int(store.lines[example])
        for example in rows.examples(index)[1]
        for _ in store.documents(example)
    ]
    return [
        {
            "line": line,
            "tokens": bounds[number + 1] - bounds[number],
            "trained": int((row.weights[bounds[number] : bounds[number + 1]] > 0).sum()),
        }
        for number, line in enumerate(lines)
    ]


def main() -> int:
    """Returns the exit code: 0 with a preview, or 64 with one line on stderr."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_SPACE, MOST_ADDRESS_SPACE))
    try:
        answer = preview(PreviewRequest.from_dict(json.load(sys.stdin)))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return CODES["user_error"]
    json.dump(answer, sys.stdout, ensure_ascii=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
