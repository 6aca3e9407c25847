"""Reads W&B offline folders: the transaction log `run-ID.wandb` and the files next to it.

The log has the format of LevelDB's log (32 KiB blocks, records in parts with CRC-32) after a header
of seven bytes; its records are messages of wandb_internal.proto.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orrery_cli.imports import wire
from orrery_cli.imports.source import (
    DAMAGES,
    SourceError,
    SourceRun,
    flat,
    is_below,
    is_number,
    number_or_name,
    read_file,
    read_text,
    unreadable,
)

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# fields of a Record
_HISTORY, _SUMMARY, _CONFIG, _STATS, _OUTPUT, _RUN, _EXIT = 2, 3, 5, 7, 13, 17, 18
_NAME, _NESTED, _JSON = 1, 2, 16  # of an item of history, summary, config and stats
_INTERNAL = ("_wandb", "_step", "_runtime", "_timestamp")


def is_offline(path: Path) -> bool:
    """Whether a path is a transaction log, or a folder with some."""
    return path.suffix == ".wandb" or (path.is_dir() and any(path.rglob("run-*.wandb")))


def read(path: Path) -> Iterator[SourceRun | SourceError]:
    """The runs of all transaction logs below a path, and why others cannot be read."""
    path = path.resolve()
    root = path.parent if path.is_file() else path
    for file in [path] if path.is_file() else sorted(path.rglob("run-*.wandb")):
        try:
            yield _run(file, root)
        except SourceError as error:
            yield error


def _run(file: Path, root: Path) -> SourceRun:
    run = SourceRun(tool="wandb", key=file.stem.removeprefix("run-"), name=file.stem)
    reader = _Reader(run, file.parent / "files", root)
    for place, record in enumerate(_records(file, root), start=1):
        try:
            reader.add(place, record)
        except DAMAGES as error:
            raise unreadable(file, place, error) from None
    if not reader.has_exit:
        run.status, run.reason = "failed", "the offline folder has no exit record"
    packages = file.parent / "files" / "requirements.txt"
    run.requirements = read_text(packages, root)[:200_000] if packages.is_file() else ""
    return run


def _records(file: Path, root: Path) -> Iterator[bytes]:
    """The records; an incomplete last one is of a program that was killed while it wrote."""
    data = read_file(file, root)
    if data[:4] != b":W&B":
        hint = "Choose the folder that `wandb` wrote, such as wandb/offline-run-…."
        raise SourceError(file, "", "it does not begin like a transaction log of W&B", hint)
    at, parts = _HEADER, list[bytes]()
    while at + _HEADER <= len(data):
        room = _BLOCK - at % _BLOCK
        if room < _HEADER:
            at += room
            continue
        check, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + _HEADER : at + _HEADER + length]
        if kind == 0 and length == 0:  # the rest of a block that was reserved
            at += room
            continue
        if len(body) < length:
            return
        if zlib.crc32(body, zlib.crc32(bytes([kind]))) != check:
            hint = "Copy the folder again; the import continues from the last complete record."
            raise SourceError(file, f"byte {at}", "the checksum of a record is wrong", hint)
        at += _HEADER + length
        parts = [body] if kind in (_FULL, _FIRST) else [*parts, body]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


class _Reader:
    """Adds records to a run; `seq` of a point is the number of its record."""

    def __init__(self, run: SourceRun, files: Path, root: Path) -> None:
        self.run, self.files, self.root = run, files, root
        self.step, self.has_exit = 0, False

    def add(self, place: int, record: bytes) -> None:
        for field, data in wire.fields(record):
            if not isinstance(data, bytes):
                continue
            if field == _RUN:
                self._run(data)
            elif field == _CONFIG:
                self.run.config |= _without_internal(_items(data))
            elif field == _SUMMARY:
                self._summary(data)
            elif field == _HISTORY:
                self._history(place, data)
            elif field == _STATS:
                self._stats(place, data)
            elif field == _OUTPUT:
                self._output(data)
            elif field == _EXIT:
                self.has_exit = True
                code = wire.integer(data, 1)
                if code:
                    self.run.status, self.run.reason = "failed", f"exit code {code}"

    def _run(self, data: bytes) -> None:
        run = self.run
        run.key = wire.text(data, 1) or run.key
        run.name = (wire.text(data, 8) or run.key)[:160]
        run.experiment = wire.text(data, 3)[:120]
        run.notes = wire.text(data, 9)[:20_000]
        run.tags = [tag.decode("utf-8", "replace")[:100] for tag in wire.all_of(data, 10)]
        run.config |= _without_internal(_items(wire.one(data, 4) or b""))
        if host := wire.text(data, 13):
            run.program["host"] = host
        if git := wire.one(data, 21):
            for name, number in (("remote", 1), ("commit", 2)):
                if value := wire.text(git, number):
                    run.program[name] = value

    def _summary(self, data: bytes) -> None:
        for name, value in _items(data).items():
            if name not in _INTERNAL and not (isinstance(value, dict) and "_type" in value):
                is_real = isinstance(value, float)
                self.run.summary[name] = number_or_name(value) if is_real else value

    def _history(self, place: int, data: bytes) -> None:
        row = _items(data)
        step = wire.integer(wire.one(data, 2) or b"", 1)
        self.step = max(0, int(row.get("_step", step) or step))
        time = float(row.get("_timestamp", 0.0) or 0.0)
        values = {}
        for name, value in row.items():
            if name in _INTERNAL:
                continue
            if isinstance(value, dict) and "_type" in value:
                self._media(name, value, time)
                continue
            for path, leaf in flat({name: value}):
                if is_number(leaf):
                    values[path[:120]] = number_or_name(float(leaf))
                elif leaf in ("NaN", "Infinity", "-Infinity"):
                    values[path[:120]] = leaf
                else:
                    self.run.skip("texts and lists in the history")
        self._point(place, time, values)

    def _point(self, place: int, time: float, values: dict[str, Any]) -> None:
        if values:
            point = {"seq": place, "step": self.step, "time": time, "values": values}
            self.run.points.append(point)

    def _stats(self, place: int, data: bytes) -> None:
        stamp = wire.one(data, 2) or b""
        time = wire.integer(stamp, 1) + wire.integer(stamp, 2) / 1e9
        values = {
            f"system/{name}"[:120]: number_or_name(float(value))
            for name, value in _items(data, items=3).items()
            if is_number(value)
        }
        self._point(place, time, values)

    def _output(self, data: bytes) -> None:
        for line in wire.text(data, 3).splitlines():
            if line.strip():
                seq = len(self.run.lines) + 1
                self.run.lines.append({"seq": seq, "text": line[:10_000]})

    def _media(self, name: str, value: dict[str, Any], time: float) -> None:
        item: dict[str, Any] = {"name": name[:200], "step": self.step, "time": time}
        kind, path = value["_type"], self.files / str(value.get("path", ""))
        if kind == "histogram":
            edges = value.get("bins") or _packed_edges(value.get("packedBins"))
            if edges and len(value.get("values") or ()) == len(edges) - 1:
                data: Any = {"counts": value["values"], "edges": edges}
                self.run.media.append({**item, "kind": "histogram", "data": data})
                return
        elif kind == "image-file" and self._is_own(path):
            data = base64.b64encode(read_file(path, self.root)).decode()
            caption = str(value.get("caption") or "")[:500]
            self.run.media.append({**item, "kind": "image", "data": data, "caption": caption})
            return
        elif kind == "images/separated":
            for index, each in enumerate(value.get("filenames") or ()):
                path = self.files / str(each)
                if self._is_own(path):
                    data = base64.b64encode(read_file(path, self.root)).decode()
                    self.run.media.append({**item, "kind": "image", "index": index, "data": data})
            return
        elif kind == "table-file" and self._is_own(path):
            table = json.loads(read_text(path, self.root))
            data = {"columns": table["columns"], "rows": table["data"][:1000]}
            self.run.media.append({**item, "kind": "table", "data": data})
            return
        self.run.skip(f"media of type {kind}")

    def _is_own(self, path: Path) -> bool:
        """Whether a file exists and lies in the run's folder: the log is not trusted."""
        is_inside = is_below(path, self.files.resolve()) and is_below(path, self.root)
        return path.is_file() and is_inside


def _items(data: bytes, *, items: int = 1) -> dict[str, Any]:
    """The values of a record by name; nested names are dictionaries."""
    values: dict[str, Any] = {}
    for item in wire.all_of(data, items):
        name = wire.text(item, _NAME)
        nested = wire.all_of(item, _NESTED) if items == 1 else []
        keys = [name] if name else [key.decode("utf-8", "replace") for key in nested]
        text = wire.text(item, _JSON)
        try:
            value = json.loads(text or "null")
        except ValueError:
            raise ValueError(f"the value of {keys} is not JSON: {text[:60]!r}") from None
        place = values
        for key in keys[:-1]:
            below = place.setdefault(key, {})
            if not isinstance(below, dict):
                below = place[key] = {}
            place = below
        if keys:
            place[keys[-1]] = value
    return values


def _without_internal(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _INTERNAL}


def _packed_edges(packed: Any) -> list[float]:
    if not isinstance(packed, dict):
        return []
    low, size, count = packed["min"], packed["size"], int(packed["count"])
    return [low + size * place for place in range(count + 1)]
