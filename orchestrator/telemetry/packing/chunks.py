"""Blocks (all metrics of one rank) and curves (one metric), packed to bytes and back.

Lossless. Does not depend on a database.
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

# marks a step without the metric; its payload differs from that of a real NaN, and copies and
# slices preserve the bits
_MISSING_BITS = np.int64(0x7FF8_0000_4D49_5353)
MISSING: np.float64 = np.array([_MISSING_BITS]).view(np.float64)[0]

_BLOCK_HEAD = struct.Struct("<II")  # points, bytes of the names
_CURVE_HEAD = struct.Struct("<HI")  # points, bytes of the packed axes
_ZLIB_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Points:
    """Positions of points: `axes` [3, n]: seq, step, tokens; `time` [n] in Unix seconds."""

    axes: Ints
    time: Floats

    def __len__(self) -> int:
        return len(self.time)

    @property
    def seq(self) -> Ints:
        """[n] sequence numbers."""
        seq: Ints = self.axes[0]
        return seq

    @property
    def step(self) -> Ints:
        """[n] steps."""
        step: Ints = self.axes[1]
        return step


@dataclass(frozen=True, slots=True)
class Block(_Points):
    """Points of one rank.

    `axes` [3, n]: seq, step, tokens; `time` [n] in Unix seconds; `values` [len(names), n].
    """

    names: tuple[str, ...]
    values: Floats


@dataclass(frozen=True, slots=True)
class Curve(_Points):
    """Points of one metric: `axes` [3, n]: seq, step, tokens; `time` [n] Unix seconds; `y` [n]."""

    y: Floats

    def take(self, keep: Mask | Ints) -> Curve:
        """The points of a mask, or at indices."""
        return Curve(self.axes[:, keep], self.time[keep], self.y[keep])

    def sorted(self) -> Curve:
        """Sorted by step, then by seq."""
        if len(self) < 2 or bool(np.all(self.step[1:] > self.step[:-1])):
            return self
        return self.take(np.lexsort((self.seq, self.step)))

    def once(self) -> Curve:
        """Sorted, without points of equal step and seq."""
        curve = self.sorted()
        repeated = (curve.step[1:] == curve.step[:-1]) & (curve.seq[1:] == curve.seq[:-1])
        return curve.take(np.concatenate(([True], ~repeated))) if repeated.any() else curve


EMPTY = Curve(np.zeros((3, 0), np.int64), np.zeros(0), np.zeros(0))


def missing(values: Floats) -> Mask:
    """Mask of the steps without the metric, in the shape of `values`."""
    mask: Mask = np.ascontiguousarray(values).view(np.int64) == _MISSING_BITS
    return mask


def batch_to_block(batch: PointBatch) -> Block:
    """Convert a batch; None becomes `MISSING`."""
    axes = np.array((batch.seq, batch.step, batch.tokens), np.int64).reshape(3, -1)
    values = np.empty((len(batch.values), axes.shape[1]))
    for row, column in zip(values, batch.values.values(), strict=True):
        if None in column:
            row[:] = [MISSING if value is None else value for value in column]
        else:
            row[:] = column
    return Block(axes, np.array(batch.time, np.float64), tuple(batch.values), values)


def select(block: Block, keep: Mask | Ints | slice) -> Block:
    """The points of a mask, at indices or in a slice."""
    return Block(block.axes[:, keep], block.time[keep], block.names, block.values[:, keep])


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks; a metric that a block lacks is `MISSING` there."""
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


def metric_curve(block: Block, name: str) -> Curve:
    """The metric's points, without the steps that do not have it."""
    try:
        return row_curve(block, block.names.index(name))
    except ValueError:
        return EMPTY


def row_curve(block: Block, row: int) -> Curve:
    """The points of the metric in row `row`, without the steps that do not have it."""
    y = block.values[row]
    absent = missing(y)
    curve = Curve(block.axes, block.time, y)
    return curve.take(~absent) if absent.any() else curve


def join_curves(curves: Sequence[Curve]) -> Curve:
    """Concatenate curves."""
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
    """Pack as plain arrays: a tail row is rewritten until full, so speed matters, not size."""
    names = json.dumps(block.names, separators=(",", ":")).encode()
    head = _BLOCK_HEAD.pack(len(block), len(names))
    return b"".join(
        (head, names, block.axes.tobytes(), block.time.tobytes(), block.values.tobytes())
    )


def unpack_block(data: bytes | memoryview) -> Block:
    """Inverse of `pack_block`."""
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
    """Packed seq, step, tokens and time, shared by all metrics of a rank."""
    columns = np.empty((4, len(time)), np.int64)
    columns[:3] = axes
    # bit patterns of positive floats are ordered as they are, so differences are small and exact
    columns[3] = time.view(np.int64)
    columns[:, 1:] -= columns[:, :-1].copy()
    return zlib.compress(_shuffle(columns), _ZLIB_LEVEL)


def pack_curve(curve: Curve, axes: bytes | None = None) -> bytes:
    """A chunk's bytes: integers and times delta-encoded, columns byte-shuffled, zlib level 1."""
    axes = pack_axes(curve.axes, np.ascontiguousarray(curve.time)) if axes is None else axes
    values = zlib.compress(_shuffle(np.ascontiguousarray(curve.y)), _ZLIB_LEVEL)
    return _CURVE_HEAD.pack(len(curve), len(axes)) + axes + values


def unpack_curve(data: bytes | memoryview) -> Curve:
    """Inverse of `pack_curve`."""
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


def _shuffle(array: npt.NDArray[np.generic]) -> bytes:
    """Byte shuffle: all first bytes, then all second bytes, …, which zlib compresses better."""
    return array.reshape(-1).view(np.uint8).reshape(-1, 8).T.tobytes()
