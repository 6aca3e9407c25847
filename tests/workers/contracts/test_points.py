"""Points and batches keep every number, also those that are not finite, through JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.contracts import Point, RunEvent
from workers.contracts.catalog.metrics import EVENT_TYPES, METRICS, metric_unit
from workers.contracts.wire.points import PointBatch

HEAD: dict[str, Any] = {"run": "r1", "attempt": 1, "rank": 0}
numbers = st.floats(allow_nan=True, allow_infinity=True)
rows = st.lists(
    st.dictionaries(st.sampled_from(["loss", "lr", "grad_norm"]), numbers), min_size=1, max_size=20
)


def same(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(
        a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a
    )


@given(rows)
def test_a_batch_gives_back_its_points(values: list[dict[str, float]]) -> None:
    points = [
        Point(**HEAD, seq=i, step=i * 2, tokens=i * 64, time=1e9 + i, values=row)
        for i, row in enumerate(values, start=1)
    ]
    wire = json.dumps(PointBatch.from_points(points).to_dict(), allow_nan=False)
    for back in (PointBatch.from_dict(json.loads(wire)), PointBatch.model_validate_json(wire)):
        read = list(back.to_points())
        assert [(p.seq, p.step, p.tokens, p.time) for p in read] == [
            (p.seq, p.step, p.tokens, p.time) for p in points
        ]
        assert all(same(a.values, b.values) for a, b in zip(read, points, strict=True))
    for point in points:
        assert same(
            Point.from_dict(json.loads(json.dumps(point.to_dict(), allow_nan=False))).values,
            point.values,
        )
        assert same(Point.model_validate_json(point.to_json()).values, point.values)


def test_pythons_own_words_for_nan_are_read() -> None:
    line = json.dumps(
        {
            **HEAD,
            "seq": 1,
            "step": 1,
            "tokens": 0,
            "time": 1.0,
            "values": {"loss": math.nan, "x": -math.inf},
        }
    )
    assert "NaN" in line
    point = Point.model_validate_json(line)
    assert math.isnan(point.values["loss"]) and point.values["x"] == -math.inf
    assert PointBatch.from_points([json.loads(line)]).to_dict()["values"] == {
        "loss": ["NaN"],
        "x": ["-Infinity"],
    }


def test_an_event_keeps_null_rank_and_odd_numbers() -> None:
    event = RunEvent(
        run="7",
        attempt=1,
        seq=3,
        time=5.0,
        type="non_finite",
        data={"loss": math.nan, "ranks": [1, math.inf]},
    )
    written = event.to_dict()
    assert written["rank"] is None and written["data"] == {"loss": "NaN", "ranks": [1, "Infinity"]}
    assert RunEvent.from_dict(written).type in EVENT_TYPES


def test_a_batch_is_of_one_rank_and_rectangular() -> None:
    point = {**HEAD, "seq": 1, "step": 1, "tokens": 0, "time": 1.0, "values": {"loss": 1.0}}
    with pytest.raises(ValueError, match="one rank"):
        PointBatch.from_points([point, {**point, "rank": 1}])
    ragged = {**PointBatch.from_points([point]).to_dict(), "values": {"loss": [1.0, 2.0]}}
    with pytest.raises(ValidationError, match="column loss has 2 entries, seq has 1"):
        PointBatch.from_dict(ragged)


def test_units() -> None:
    assert metric_unit("loss") == metric_unit("loss/web") == "nats/token"
    assert metric_unit("memory/params_bytes") == "bytes" and metric_unit("my_tool/time_s") == "s"
    assert metric_unit("something") == ""
    assert len([name for name in METRICS if name.startswith("memory/")]) == 11
