"""Writes flat tables as Parquet files, one row group at a time.

Depends on the standard library only, because Python's libraries that write Parquet are 100 MB or
larger with their dependencies. Implements what a table without nesting needs: optional columns of
four types, one plain data page (version 1) per column and row group, compressed with gzip, and the
footer in Thrift's compact protocol. The tests read the files with DuckDB.

Sources: https://parquet.apache.org/docs/file-format/ (pages, levels, plain encoding),
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift (fields),
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

Kind = Literal["integer", "number", "time", "text"]

_MAGIC: Final = b"PAR1"
_INT64, _DOUBLE, _BYTE_ARRAY = 2, 5, 6  # parquet.thrift: Type
_PLAIN, _RLE, _GZIP, _OPTIONAL, _DATA_PAGE = 0, 3, 2, 1, 0
_PHYSICAL: Final = {"integer": _INT64, "number": _DOUBLE, "time": _INT64, "text": _BYTE_ARRAY}
_CONVERTED: Final = {"text": 0, "time": 10}  # UTF8, TIMESTAMP_MICROS
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ParquetColumn:
    """A column: its values are int, float, datetime with a time zone, or str; or None."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One column of a row group in the file."""

    offset: int
    rows: int
    plain_size: int
    stored_size: int


def parquet_file(
    columns: Sequence[ParquetColumn], groups: Iterable[Sequence[Sequence[Any]]]
) -> Iterator[bytes]:
    """The parts of a file; a part per row group. Each row has a value for every column."""
    written: list[list[_Chunk]] = []
    head, offset = _MAGIC, len(_MAGIC)
    for rows in groups:
        part = bytearray()
        chunks: list[_Chunk] = []
        for number, column in enumerate(columns):
            page, plain_size = _page([row[number] for row in rows], column.kind)
            chunks.append(_Chunk(offset + len(part), len(rows), plain_size, len(page)))
            part += page
        written.append(chunks)
        offset += len(part)
        yield head + bytes(part)
        head = b""
    footer = _struct(_footer(columns, written))
    yield head + footer + struct.pack("<I", len(footer)) + _MAGIC


def _page(values: list[Any], kind: Kind) -> tuple[bytes, int]:
    """A data page with its header, and its size if it were not compressed."""
    present = [value for value in values if value is not None]
    levels = _levels([value is not None for value in values])
    plain = struct.pack("<I", len(levels)) + levels + _encoded(present, kind)
    stored = gzip.compress(plain, 6, mtime=0)
    levels_and_values = {1: len(values), 2: _PLAIN, 3: _RLE, 4: _RLE}
    header = _struct({1: _DATA_PAGE, 2: len(plain), 3: len(stored), 5: levels_and_values})
    return header + stored, len(header) + len(plain)


def _levels(present: list[bool]) -> bytes:
    """Definition levels of one bit as one bit-packed run of the RLE hybrid."""
    size = (len(present) + 7) // 8
    bits = sum(1 << at for at, here in enumerate(present) if here)
    return _varint(size << 1 | 1) + bits.to_bytes(size, "little")


def _encoded(values: list[Any], kind: Kind) -> bytes:
    if kind == "text":
        texts = [value.encode("utf-8", "replace") for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if kind == "time":
        values = [(value - _EPOCH) // timedelta(microseconds=1) for value in values]
    return struct.pack(f"<{len(values)}{'d' if kind == 'number' else 'q'}", *values)


def _footer(columns: Sequence[ParquetColumn], groups: list[list[_Chunk]]) -> dict[int, Any]:
    """FileMetaData."""
    root = {4: "runs", 5: len(columns)}
    return {
        1: 1,
        2: [root, *(_schema_element(column) for column in columns)],
        3: _Long(sum(chunks[0].rows for chunks in groups)),
        4: [_row_group(columns, chunks) for chunks in groups],
        6: "Orrery",
    }


def _schema_element(column: ParquetColumn) -> dict[int, Any]:
    element: dict[int, Any] = {1: _PHYSICAL[column.kind], 3: _OPTIONAL, 4: column.name}
    if column.kind in _CONVERTED:
        microseconds: dict[int, Any] = {2: {}}
        logical = {1: {}} if column.kind == "text" else {8: {1: True, 2: microseconds}}
        element |= {6: _CONVERTED[column.kind], 10: logical}
    return element


def _row_group(columns: Sequence[ParquetColumn], chunks: list[_Chunk]) -> dict[int, Any]:
    parts = [
        {2: _Long(chunk.offset), 3: _column_metadata(column, chunk)}
        for column, chunk in zip(columns, chunks, strict=True)
    ]
    size = sum(chunk.plain_size for chunk in chunks)
    return {1: parts, 2: _Long(size), 3: _Long(chunks[0].rows)}


def _column_metadata(column: ParquetColumn, chunk: _Chunk) -> dict[int, Any]:
    return {
        1: _PHYSICAL[column.kind],
        2: [_PLAIN, _RLE],
        3: [column.name],
        4: _GZIP,
        5: _Long(chunk.rows),
        6: _Long(chunk.plain_size),
        7: _Long(chunk.stored_size),
        9: _Long(chunk.offset),
    }


class _Long(int):
    """An i64 of Thrift; other ints are i32."""


def _struct(fields: dict[int, Any]) -> bytes:
    """A Thrift struct of field numbers, ascending, to values."""
    out, before = bytearray(), 0
    for number, value in fields.items():
        code = (1 if value else 2) if isinstance(value, bool) else _code(value)
        out.append((number - before) << 4 | code)
        before = number
        if not isinstance(value, bool):  # a field's type is its truth value
            out += _value(value)
    return bytes(out) + b"\0"


def _code(value: Any) -> int:
    """The type of a value in the compact protocol."""
    if isinstance(value, int):
        return 6 if isinstance(value, _Long) else 5
    if isinstance(value, str):
        return 8
    return 9 if isinstance(value, list) else 12


def _value(value: Any) -> bytes:
    if isinstance(value, int):
        return _varint(value << 1)  # zigzag of a number that is not negative
    if isinstance(value, str):
        text = value.encode("utf-8", "replace")
        return _varint(len(text)) + text
    if isinstance(value, dict):
        return _struct(value)
    code = _code(value[0]) if value else 12
    size = bytes([len(value) << 4 | code]) if len(value) < 15 else b""
    return (size or bytes([0xF0 | code]) + _varint(len(value))) + b"".join(map(_value, value))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
