"""Packing is lossless, including bits of times, NaN, and missing values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.telemetry.packing.chunks import (
    Curve,
    batch_to_block,
    join_blocks,
    metric_curve,
    pack_block,
    pack_curve,
    unpack_block,
    unpack_curve,
)
from workers.contracts.wire.points import PointBatch

value = st.floats(allow_nan=True, allow_infinity=True)
big = st.integers(0, 2**62)
point = st.tuples(big, big, big, st.floats(0, 4e9), value)


@given(st.lists(point, min_size=1, max_size=256))
def test_a_curve_survives_packing(points: list[tuple[int, int, int, float, float]]) -> None:
    columns = list(zip(*points, strict=True))
    curve = Curve(np.array(columns[:3], np.int64), np.array(columns[3]), np.array(columns[4]))
    back = unpack_curve(pack_curve(curve))
    assert np.array_equal(back.axes, curve.axes)
    assert np.array_equal(back.time.view(np.int64), curve.time.view(np.int64))
    assert np.array_equal(back.y.view(np.int64), curve.y.view(np.int64))


def batch(steps: list[int], **values: list[float | None]) -> PointBatch:
    return PointBatch(
        run="1",
        attempt=1,
        rank=0,
        seq=steps,
        step=steps,
        tokens=steps,
        time=[float(s) for s in steps],
        values=values,
    )


def test_a_missing_value_is_not_a_nan() -> None:
    one = batch_to_block(
        batch([1, 2, 3], loss=[1.0, float("nan"), 3.0], val_loss=[None, 2.0, None])
    )
    two = batch_to_block(batch([4], lr=[0.1], loss=[4.0]))
    block = unpack_block(pack_block(join_blocks([one, two])))
    assert metric_curve(block, "loss").step.tolist() == [1, 2, 3, 4]
    assert np.isnan(metric_curve(block, "loss").y[1])
    assert metric_curve(block, "val_loss").step.tolist() == [2]
    assert metric_curve(block, "lr").y.tolist() == [0.1]
    assert len(metric_curve(block, "unknown")) == 0


def test_a_dense_chunk_is_small() -> None:
    """Constant values and regular axes compress well."""
    count = np.arange(1, 257)
    axes, time = (
        np.array([count, count, count * 4096]),
        1.79e9 + np.cumsum(np.random.default_rng(0).random(256)),
    )
    assert len(pack_curve(Curve(axes, time, np.full(256, 6e-4)))) < 4 * 256
