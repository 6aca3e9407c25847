"""Reads TensorBoard event files: scalars, histograms, images, texts and hyperparameters.

Formats: tensorflow/core/lib/io/record_writer.h, util/event.proto, framework/summary.proto,
framework/tensor.proto and tensorboard/plugins/hparams/plugin_data.proto.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from orrery_cli.imports import wire
from orrery_cli.imports.source import DAMAGES, SourceError, SourceRun, number_or_name, unreadable

_FRAME = 12  # u64 length and its checksum
_POLYNOMIAL = 0x82F63B78  # CRC-32C
_SIZES = {1: ("<f", 4), 2: ("<d", 8)}  # DataType of framework/types.proto
_STRING = 7
_RANGE = 1_000_000_000  # numbers of points of a file
_MOST_BINS = 512


def is_log(path: Path) -> bool:
    """Whether a path is an event file, or a folder with some."""
    return "tfevents" in path.name or (path.is_dir() and any(path.rglob("*tfevents*")))


def read(path: Path) -> Iterator[SourceRun | SourceError]:
    """A run per folder with event files, and why others cannot be read."""
    files = [path] if path.is_file() else sorted(path.rglob("*tfevents*"))
    folders = {file.parent for file in files}
    for folder in sorted(folders):
        own = [file for file in files if file.parent == folder]
        name = folder.resolve().name
        if path.is_dir() and folder != path:
            name = f"{path.resolve().name}/{folder.relative_to(path).as_posix()}"
        try:
            run = _run(own, name)
        except SourceError as error:
            yield error
            continue
        if run.points or run.media or run.config:
            yield run


def _run(files: list[Path], name: str) -> SourceRun:
    """The run of a folder; each file numbers its points in a range of its own, as it may grow."""
    run = SourceRun(tool="tensorboard", key="", name=name[:160])
    first = 0.0
    for number, file in enumerate(files):
        seq, plugins = number * _RANGE, dict[str, str]()
        for place, record in _records(file):
            try:
                time, values = _event(run, record, plugins)
            except DAMAGES as error:
                raise unreadable(file, place, error) from None
            if values:
                seq += 1
                run.points.append({"seq": seq, **values})
            first = first or time
    run.key = f"{files[0].name}:{first!r}"
    return run


def _records(file: Path) -> Iterator[tuple[int, bytes]]:
    """`(number from 1, data)`; an incomplete last record is of a program that still writes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            yield from _stream(file, stream, size)
    except OSError as error:
        raise SourceError(file, "", error.strerror or str(error)) from None


def _stream(file: Path, stream: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    at, place = 0, 0
    while at + _FRAME <= size:
        place += 1
        head = stream.read(_FRAME)
        if len(head) < _FRAME:
            return
        length, check = struct.unpack("<QI", head)
        if check != _masked_crc(head[:8]):
            message = f"the checksum of its length at byte {at} is wrong"
            raise SourceError(file, f"record {place}", message, "Copy the file again.")
        start = at + _FRAME
        at = start + length + 4
        body = stream.read(length + 4) if at <= size else b""
        if len(body) < length + 4:
            return
        (check,) = struct.unpack_from("<I", body, length)
        body = body[:length]
        if length <= 4096 and check != _masked_crc(body):  # long ones would take seconds
            message = f"its checksum at byte {start + length} is wrong"
            raise SourceError(file, f"record {place}", message, "Copy the file again.")
        yield place, body


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _event(
    run: SourceRun, record: bytes, plugins: dict[str, str]
) -> tuple[float, dict[str, Any] | None]:
    """Add an event's media to the run; returns its time and its point without `seq`, if any.

    `plugins`: of each tag, which only its first event names.
    """
    time = (wire.one(record, 1) or b"\0" * 8).ljust(8, b"\0")
    (seconds,) = struct.unpack("<d", time)
    step = max(0, wire.integer(record, 2))
    values: dict[str, Any] = {}
    for summary in wire.all_of(record, 5):
        for value in wire.all_of(summary, 1):
            tag = wire.text(value, 1)[:200]
            number = _number(value)
            if number is not None:
                values[tag[:120]] = number_or_name(number)
            elif not _add_other(run, value, tag, step, seconds, plugins):
                run.skip("values of other kinds")
    point = {"step": step, "time": seconds, "values": values} if values else None
    return float(seconds), point


def _number(value: bytes) -> float | None:
    """`simple_value`, or a tensor with one element."""
    for number, data in wire.fields(value):
        if number == 2 and isinstance(data, bytes) and len(data) == 4:
            return float(struct.unpack("<f", data)[0])
    tensor = wire.one(value, 8)
    if tensor is None:
        return None
    pattern, size = _SIZES.get(wire.integer(tensor, 1), ("", 0))
    content = next((each for field in (4, 5, 6) if (each := wire.one(tensor, field))), b"")
    return float(struct.unpack(pattern, content)[0]) if size and len(content) == size else None


def _add_other(
    run: SourceRun, value: bytes, tag: str, step: int, time: float, plugins: dict[str, str]
) -> bool:
    """Add an image, histogram, text or hyperparameters; False if it is none of them."""
    item: dict[str, Any] = {"name": tag, "step": step, "time": time}
    plugin = wire.one(wire.one(value, 9) or b"", 1) or b""
    name = plugins[tag] = wire.text(plugin, 1) or plugins.get(tag, "")
    if name == "hparams":
        start = wire.one(wire.one(plugin, 2) or b"", 3)
        for entry in wire.all_of(start or b"", 1):
            run.config[wire.text(entry, 1)] = _hyperparameter(wire.one(entry, 2) or b"")
        return True
    if image := wire.one(value, 4):
        data = base64.b64encode(wire.one(image, 4) or b"").decode()
        run.media.append({**item, "kind": "image", "data": data})
        return True
    if histogram := wire.one(value, 5):
        body = _histogram(histogram)
        run.media += [{**item, "kind": "histogram", "data": body}] if body else []
        return body is not None
    tensor = wire.one(value, 8)
    if tensor is not None and wire.integer(tensor, 1) == _STRING:
        return _add_strings(run, item, name, wire.all_of(tensor, 8))
    return False


def _add_strings(run: SourceRun, item: dict[str, Any], plugin: str, texts: list[bytes]) -> bool:
    """Add a tensor of texts, or of an image's width, height and files (tf.summary.image)."""
    if plugin == "images":
        for index, file in enumerate(texts[2:]):
            data = base64.b64encode(file).decode()
            run.media.append({**item, "kind": "image", "index": index, "data": data})
        return len(texts) > 2
    if plugin not in ("", "text"):
        return False
    try:
        text = b"\n".join(texts).decode("utf-8", "replace" if plugin else "strict")
    except UnicodeDecodeError:
        return False
    name = item["name"].removesuffix("/text_summary")
    run.media.append({**item, "name": name, "kind": "text", "data": text[:16_000]})
    return True


def _hyperparameter(value: bytes) -> Any:
    """A google.protobuf.Value without lists and objects."""
    for number, data in wire.fields(value):
        if number == 2 and isinstance(data, bytes):
            return struct.unpack("<d", data)[0]
        if number == 3 and isinstance(data, bytes):
            return data.decode("utf-8", "replace")
        if number == 4:
            return bool(data)
    return None


def _histogram(data: bytes) -> dict[str, list[float]] | None:
    """Bins between finite, ascending limits; empty ones at the ends are left out."""
    (low,) = struct.unpack("<d", wire.one(data, 1) or b"\0" * 8)
    (high,) = struct.unpack("<d", wire.one(data, 2) or b"\0" * 8)
    limits, counts = wire.doubles(data, 6), wire.doubles(data, 7)
    filled = [place for place, count in enumerate(counts) if count > 0]
    if not filled or len(limits) != len(counts) or not math.isfinite(low + high):
        return None
    first, last = filled[0], filled[-1]
    edges = [limits[first - 1] if first else low]
    bins = []
    for place in range(first, last + 1):
        edge = min(limits[place], max(high, edges[-1])) if place == last else limits[place]
        if edge <= edges[-1]:
            edge = math.nextafter(edges[-1], math.inf)
        edges.append(edge)
        bins.append(counts[place])
    while len(bins) > _MOST_BINS:
        bins = [sum(bins[at : at + 2]) for at in range(0, len(bins), 2)]
        edges = [*edges[:-1:2], edges[-1]]
    return {"counts": bins, "edges": edges}
