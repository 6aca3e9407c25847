"""Documents of text and JSON lines files, read in chunks; errors name the line or byte offset.

Does not depend on tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from workers.contracts.specs.data import SUFFIXES
from workers.runtime.exit_codes import UserError

_CHUNK = 1 << 16  # small, so that a tokenizer's threads share a text
_LONGEST = 1 << 23  # characters without a line break before a chunk is ended anyway
_LINE_BREAK = re.compile(r"\S\n(?=\S)")
BOM = b"\xef\xbb\xbf"


def list_files(path: Path, format_: str) -> list[Path]:
    """The file itself, or a folder's files of that format by name. Raises UserError if there is
    none.
    """
    if path.is_file():
        return [path]
    names = " or ".join(f"*{suffix}" for suffix in SUFFIXES[format_])
    if not path.is_dir():
        raise UserError(
            f"data.path: {path} does not exist. Use the path of a {format_} file on this node."
        )
    files = sorted(
        each for each in path.iterdir() if each.suffix in SUFFIXES[format_] and each.is_file()
    )
    if not files:
        raise UserError(
            f"data.path: {path} is a folder without {names}. Use the path of a {format_} file."
        )
    return files


def text_chunks(path: Path) -> Iterator[str]:
    """The text in chunks that end with a line before one that is not indented.

    No tokenizer joins text across such a line break, so the tokens equal those of the full text.
    Raises UserError with the offset of the first byte that is not UTF-8.
    """
    rest = ""
    for piece in _decoded(path):
        rest += piece
        end = max((match.end() for match in _LINE_BREAK.finditer(rest)), default=0)
        if not end and len(rest) > _LONGEST:
            end = max(rest.rfind("\n"), rest.rfind(" ")) + 1 or len(rest)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def json_documents(path: Path) -> Iterator[str]:
    """The field `text` of every line. Raises UserError that names the first line without one."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(BOM) if number == 1 else raw
            if line.strip():
                yield _parse_text(line, f"data.path: {path}: line {number}")


def check_text(path: Path) -> None:
    """Raises UserError if the file is empty, or with the offset of the first byte that is not
    UTF-8.
    """
    if not path.stat().st_size:
        raise UserError(f"data.path: {path} is empty. Use a file with text.")
    for _ in _decoded(path):
        pass


def _parse_text(line: bytes, where: str) -> str:
    try:
        document = json.loads(line)
    except UnicodeDecodeError as error:
        message = f"byte {line[error.start]:#04x} at its offset {error.start} is not UTF-8"
        raise UserError(f"{where}: {message}. Convert the file with iconv -t UTF-8.") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}. Use one JSON object per line.") from None
    text = document.get("text") if isinstance(document, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(document, dict) and "messages" in document:
        raise UserError(
            f'{where} is a conversation ("messages"), pretraining reads "text". '
            "Use train.objective sft."
        )
    actual = (
        f"has the fields {', '.join(map(str, document)) or '(none)'}"
        if isinstance(document, dict)
        else "is not an object"
    )
    raise UserError(f'{where} is not {{"text": "..."}}, it {actual}. Use one JSON object per line.')


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with open(path, "rb") as file:
        while True:
            piece = file.read(_CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                message = f"byte {error.object[error.start]:#04x} at offset {at} is not UTF-8"
                raise UserError(
                    f"data.path: {path}: {message}. Convert the file with iconv -t UTF-8."
                ) from None
            yield text.removeprefix("\ufeff") if not offset else text
            offset += len(piece)
            if not piece:
                return
