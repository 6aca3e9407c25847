"""Packing of points: a block is what one rank sent (all its metrics), a curve is one metric; both
to bytes and back.

Lossless. Knows arrays and bytes, no database.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.contracts.wire.points import PointBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CHUNK = 256  # points in a full chunk, and summaries in one of a level above

# a step that lacks a metric, told apart from a real NaN by the NaN's payload; copies and slices
# keep the bits
_MISSING_BITS = np.int64(0x7FF8_0000_4D49_5353)
MISSING: np.float64 = np.array([_MISSING_BITS]).view(np.float64)[0]

_BLOCK_HEAD = struct.Struct("<II")  # points, bytes of the names
_CURVE_HEAD = struct.Struct("<HI")  # points, bytes of the packed axes
_ZLIB_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Points:
    """What points have besides their values: `axes` [3, n]: seq, step, tokens; `time` [n] in Unix
    seconds.
    """

    axes: Ints
    time: Floats

    def __len__(self) -> int:
        return len(self.time)

    @property
    def seq(self) -> Ints:
        found: Ints = self.axes[0]
        return found

    @property
    def step(self) -> Ints:
        found: Ints = self.axes[1]
        return found


@dataclass(frozen=True, slots=True)
class Block(_Points):
    """Points of one rank.

    `axes` [3, n]: seq, step, tokens; `time` [n] in Unix seconds; `values` [len(names), n].
    """

    names: tuple[str, ...]
    values: Floats


@dataclass(frozen=True, slots=True)
class Curve(_Points):
    """Points of one metric: `axes` [3, n]: seq, step, tokens; `time` [n] in Unix seconds; `y` [n]."""

    y: Floats

    def take(self, keep: Mask | Ints) -> Curve:
        return Curve(self.axes[:, keep], self.time[keep], self.y[keep])

    def sorted(self) -> Curve:
        """By step, then by number."""
        if len(self) < 2 or bool(np.all(self.step[1:] > self.step[:-1])):
            return self
        return self.take(np.lexsort((self.seq, self.step)))

    def once(self) -> Curve:
        """Sorted, each number once."""
        curve = self.sorted()
        again = (curve.step[1:] == curve.step[:-1]) & (curve.seq[1:] == curve.seq[:-1])
        return curve.take(np.concatenate(([True], ~again))) if again.any() else curve


EMPTY = Curve(np.zeros((3, 0), np.int64), np.zeros(0), np.zeros(0))


def missing(values: Floats) -> Mask:
    """Where a step lacks the metric."""
    found: Mask = np.ascontiguousarray(values).view(np.int64) == _MISSING_BITS
    return found


def block_of(batch: PointBatch) -> Block:
    axes = np.array((batch.seq, batch.step, batch.tokens), np.int64).reshape(3, -1)
    values = np.empty((len(batch.values), axes.shape[1]))
    for row, column in zip(values, batch.values.values(), strict=True):
        if None in column:
            row[:] = [MISSING if value is None else value for value in column]
        else:
            row[:] = column
    return Block(axes, np.array(batch.time, np.float64), tuple(batch.values), values)


def select(block: Block, keep: Mask | Ints | slice) -> Block:
    return Block(block.axes[:, keep], block.time[keep], block.names, block.values[:, keep])


def join_blocks(blocks: Sequence[Block]) -> Block:
    """One block in the order given; a metric that some of them lack is missing there."""
    if len(blocks) == 1:
        return blocks[0]
    names = blocks[0].names
    if any(block.names != names for block in blocks):
        names = tuple(dict.fromkeys(name for block in blocks for name in block.names))
    count = sum(len(block) for block in blocks)
    values = np.full((len(names), count), MISSING)
    row_of = {name: row for row, name in enumerate(names)}
    start = 0
    for block in blocks:
        rows = [row_of[name] for name in block.names]
        values[rows, start : start + len(block)] = block.values
        start += len(block)
    axes = np.concatenate([block.axes for block in blocks], axis=1)
    return Block(axes, np.concatenate([block.time for block in blocks]), names, values)


def curve_of(block: Block, name: str) -> Curve:
    """The metric's points, without the steps that lack it."""
    if name not in block.names:
        return EMPTY
    y = block.values[block.names.index(name)]
    gone = missing(y)
    curve = Curve(block.axes, block.time, y)
    return curve.take(~gone) if gone.any() else curve


def join_curves(curves: Sequence[Curve]) -> Curve:
    if len(curves) == 1:
        return curves[0]
    if not curves:
        return EMPTY
    return Curve(
        np.concatenate([curve.axes for curve in curves], axis=1),
        np.concatenate([curve.time for curve in curves]),
        np.concatenate([curve.y for curve in curves]),
    )


def pack_block(block: Block) -> bytes:
    """Plain arrays: a tail row is rewritten until it is full, so it must be cheap, not small."""
    names = json.dumps(block.names, separators=(",", ":")).encode()
    head = _BLOCK_HEAD.pack(len(block), len(names))
    return b"".join(
        (head, names, block.axes.tobytes(), block.time.tobytes(), block.values.tobytes())
    )


def unpack_block(data: bytes | memoryview) -> Block:
    data = bytes(data)
    count, size = _BLOCK_HEAD.unpack_from(data)
    at = _BLOCK_HEAD.size + size
    names = tuple(json.loads(data[_BLOCK_HEAD.size : at]))
    axes = np.frombuffer(data, np.int64, 3 * count, at).reshape(3, count)
    time = np.frombuffer(data, np.float64, count, at + 24 * count)
    values = np.frombuffer(data, np.float64, len(names) * count, at + 32 * count).reshape(
        len(names), count
    )
    return Block(axes, time, names, values)


def pack_axes(axes: Ints, time: Floats) -> bytes:
    """Packed seq, step, tokens and time; metrics of one rank share them, so they are packed once
    for all.
    """
    columns = np.empty((4, len(time)), np.int64)
    columns[:3] = axes
    # bit patterns of positive floats ascend with them, so their differences are small and exact
    columns[3] = time.view(np.int64)
    columns[:, 1:] -= columns[:, :-1].copy()
    return zlib.compress(_shuffled(columns), _ZLIB_LEVEL)


def pack_curve(curve: Curve, axes: bytes | None = None) -> bytes:
    """A chunk's bytes: integers and times delta-coded, all columns byte-shuffled, zlib level 1."""
    axes = pack_axes(curve.axes, np.ascontiguousarray(curve.time)) if axes is None else axes
    values = zlib.compress(_shuffled(np.ascontiguousarray(curve.y)), _ZLIB_LEVEL)
    return _CURVE_HEAD.pack(len(curve), len(axes)) + axes + values


def unpack_curve(data: bytes | memoryview) -> Curve:
    count, size = _CURVE_HEAD.unpack_from(data)
    at = _CURVE_HEAD.size
    raw = np.frombuffer(zlib.decompress(data[at : at + size]), np.uint8)
    columns = np.cumsum(raw.reshape(8, -1).T.copy().view(np.int64).reshape(4, count), axis=1)
    y = (
        np.frombuffer(zlib.decompress(data[at + size :]), np.uint8)
        .reshape(8, count)
        .T.copy()
        .view(np.float64)
    )
    return Curve(columns[:3], columns[3].view(np.float64), y.reshape(count))


def _shuffled(array: npt.NDArray[np.generic]) -> bytes:
    """First bytes of all numbers, then second bytes, ...: equal exponents and leading zeros lie
    together for zlib.
    """
    return array.reshape(-1).view(np.uint8).reshape(-1, 8).T.tobytes()
