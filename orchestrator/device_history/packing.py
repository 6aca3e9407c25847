"""Packs points into short byte strings and back; the minimum, mean and maximum of each metric.

Points are 16-bit fractions of the largest value of their metric, so the error is at most 1/130,000
of it. zlib compresses the high and the low bytes apart. Does not depend on the database.

Legend: D devices, M metrics, N metrics of the node, T points, S = 3 statistics.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.device_history.series import DEVICE, MAX, MEAN, MIN, NODE

Floats = NDArray[np.float32]

_VERSION = 1
_HEAD = struct.Struct("<BHHH")  # version, points, devices, metrics of the other block
_TOP = 65_534
_MISSING = 65_535
_LEVEL = 6


@dataclass(slots=True)
class Chunk:
    """`devices` is [D, M, S, T], `other` [N, S, T]; NaN: no reading. `indexes` names devices."""

    indexes: tuple[int, ...]
    devices: Floats
    other: Floats

    @property
    def points(self) -> int:
        """T."""
        return int(self.other.shape[-1])


def empty(points: int, *, indexes: Sequence[int] = (), other: int = len(NODE)) -> Chunk:
    """A chunk of `points` points without readings."""
    return Chunk(
        tuple(indexes),
        np.full((len(indexes), len(DEVICE), 3, points), np.nan, np.float32),
        np.full((other, 3, points), np.nan, np.float32),
    )


def pack(chunk: Chunk) -> bytes:
    """The chunk as bytes."""
    devices, device_tops = _codes(chunk.devices, (0, 2, 3))
    other, other_tops = _codes(chunk.other, (1, 2))
    codes = np.concatenate([devices, other])
    planes = np.concatenate([(codes >> 8).astype(np.uint8), (codes & 255).astype(np.uint8)])
    count, metrics = len(chunk.indexes), chunk.other.shape[0]
    head = _HEAD.pack(_VERSION, chunk.points, count, metrics)
    indexes = np.asarray(chunk.indexes, np.uint16).tobytes()
    tops = np.concatenate([device_tops, other_tops]).astype(np.float32).tobytes()
    return zlib.compress(head + indexes + tops + planes.tobytes(), _LEVEL)


def unpack(data: bytes | memoryview) -> Chunk:
    """The chunk. Raises ValueError for bytes of another version."""
    raw = zlib.decompress(data)
    version, points, count, metrics = _HEAD.unpack_from(raw)
    if version != _VERSION:
        raise ValueError(f"readings of version {version}; this release reads {_VERSION}")
    at = _HEAD.size
    indexes = np.frombuffer(raw, np.uint16, count, at)
    at += 2 * count
    tops = np.frombuffer(raw, np.float32, len(DEVICE) + metrics, at)
    at += 4 * tops.size
    first = count * len(DEVICE) * 3 * points
    size = first + metrics * 3 * points
    planes = np.frombuffer(raw, np.uint8, 2 * size, at)
    codes = planes[:size].astype(np.uint16) << 8 | planes[size:]
    values = np.where(codes == _MISSING, np.float32(np.nan), codes / np.float32(_TOP))
    devices = values[:first].reshape(count, len(DEVICE), 3, points)
    other = values[first:].reshape(metrics, 3, points)
    return Chunk(
        tuple(int(index) for index in indexes),
        np.asarray(devices * tops[: len(DEVICE), None, None], np.float32),
        np.asarray(other * tops[len(DEVICE) :, None, None], np.float32),
    )


def summarize(values: Floats, counts: Sequence[int] | None = None) -> Floats:
    """Points reduced to one per group: [..., S, T] to [..., S, G]; NaN for groups without reading.

    `counts` are the numbers of neighboring points of each group; by default one group.
    """
    groups = [values.shape[-1]] if counts is None else counts
    result = np.full((*values.shape[:-1], len(groups)), np.nan, np.float32)
    known = ~np.isnan(values[..., MEAN, :])
    low = np.where(known, values[..., MIN, :], np.inf)
    high = np.where(known, values[..., MAX, :], -np.inf)
    sums = np.where(known, values[..., MEAN, :], 0.0).astype(np.float64)
    at = 0
    for group, count in enumerate(groups):
        part = slice(at, at + count)
        at += count
        number = known[..., part].sum(-1)
        has = number > 0
        mean = sums[..., part].sum(-1) / np.maximum(number, 1)
        result[..., MIN, group] = np.where(has, low[..., part].min(-1, initial=np.inf), np.nan)
        result[..., MEAN, group] = np.where(has, mean, np.nan)
        result[..., MAX, group] = np.where(has, high[..., part].max(-1, initial=-np.inf), np.nan)
    return result


def with_devices(chunk: Chunk, indexes: Sequence[int]) -> Chunk:
    """The chunk with at least these devices, in ascending order; new ones have no readings."""
    wanted = tuple(sorted({*chunk.indexes, *indexes}))
    if wanted == chunk.indexes:
        return chunk
    wider = empty(chunk.points, indexes=wanted, other=chunk.other.shape[0])
    for row, index in enumerate(chunk.indexes):
        wider.devices[wanted.index(index)] = chunk.devices[row]
    return Chunk(wanted, wider.devices, chunk.other)


def _codes(values: Floats, axes: tuple[int, ...]) -> tuple[NDArray[np.uint16], Floats]:
    """Codes of the values, flat, and the largest value of each metric (the remaining axis)."""
    known = ~np.isnan(values)
    positive = np.where(known, np.maximum(values, 0.0), 0.0)
    tops = positive.max(axis=axes, initial=0.0).astype(np.float32)
    shape = (-1, 1, 1)
    scale = np.where(tops > 0, _TOP / np.maximum(tops, np.float32(1e-30)), 0.0).reshape(shape)
    codes = np.where(known, np.rint(positive * scale), _MISSING).astype(np.uint16)
    return codes.reshape(-1), tops
