"""Point, PointBatch and RunEvent: metrics and events that a running program reports.

Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity"; the bare words that
Python's json writes are accepted as well. Does not depend on storage or envelopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from workers.contracts.base import Contract, Refused, WireContract
from workers.contracts.specs.model import Count

# Unix seconds, up to the end of year 9999
Time = Annotated[float, Field(ge=0, le=253_402_300_799, allow_inf_nan=False)]
RunId = Annotated[str, Field(min_length=1, max_length=64, coerce_numbers_to_str=True)]

MAX_NAMES_PER_POINT: Final = 1000
MAX_NAMES_PER_RUN: Final = 20_000
MAX_DEPTH: Final = 50  # of nested objects and lists in an event's data
MAX_EVENT_BYTES: Final = 1_000_000  # of an event's data as JSON
_NOT_FINITE: Final = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


def _named_number(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """A number, or the name of one that is not finite; texts such as "1" and booleans are not."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    return handler(value)


Number = Annotated[
    float,
    Field(strict=True, allow_inf_nan=True),
    WrapValidator(_named_number),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]
_SLOW_COLUMN: TypeAdapter[list[float | None]] = TypeAdapter(list[Number | None])


def _column(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """A column in native code, or entry by entry if it names numbers that are not finite."""
    try:
        return handler(value)
    except ValidationError:
        if isinstance(value, list) and any(isinstance(entry, str) for entry in value):
            return _SLOW_COLUMN.validate_python(value)
        raise


Column = Annotated[
    list[Annotated[float, Field(strict=True, allow_inf_nan=True)] | None],
    WrapValidator(_column),
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "number"},
                    {"enum": ["NaN", "Infinity", "-Infinity"]},
                    {"type": "null"},
                ]
            },
        }
    ),
]
MetricName = Annotated[str, Field(min_length=1, max_length=120)]


def depth(data: Any) -> int:
    """Levels of nested objects and lists; 0 for a plain value. Does not recurse."""
    levels, level = 0, [data]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        levels += 1
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return levels


def _shallow(data: dict[str, Any]) -> dict[str, Any]:
    if depth(data) > MAX_DEPTH:
        raise Refused(f"the data is nested more than {MAX_DEPTH} levels deep", "Use fewer levels.")
    return data


_LOOSE = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")


class Point(Contract):
    """All metrics of one logged step of one rank.

    `seq` counts per attempt and rank from 1; `tokens` is cumulative.
    """

    model_config: ClassVar[ConfigDict] = _LOOSE

    run: RunId
    attempt: Count
    rank: Count
    seq: Count
    step: Count
    tokens: Count
    time: Time
    values: Annotated[dict[MetricName, Number], Field(max_length=MAX_NAMES_PER_POINT)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            **vars(self),
            "values": {name: encode_number(value) for name, value in self.values.items()},
        }


class RunEvent(Contract):
    """An event of a run, of one `rank` or of all (null); `data` is any plain JSON."""

    model_config: ClassVar[ConfigDict] = _LOOSE

    run: RunId
    attempt: Count
    rank: int | None = None
    seq: Count
    time: Time
    type: Annotated[str, Field(min_length=1, max_length=60)]
    data: Annotated[dict[str, Any], AfterValidator(_shallow)] = {}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**vars(self), "data": plain(self.data)}


class ReportedEvent(RunEvent):
    """An event on the wire: unknown fields are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class PointBatch(WireContract):
    """Points of one rank in columns: `values[name][i]` belongs to `seq[i]`, null if it is missing.

    Columns are validated as lists in native code, without building Points.
    """

    model_config: ClassVar[ConfigDict] = _LOOSE

    v: int = 1
    run: RunId
    attempt: Count
    rank: Count
    seq: list[Count]
    step: list[Count]
    tokens: list[Count]
    time: list[Time]
    values: Annotated[dict[MetricName, Column], Field(max_length=MAX_NAMES_PER_RUN)]

    @model_validator(mode="after")
    def _rectangular(self) -> PointBatch:
        rows = len(self.seq)
        columns: Mapping[str, Sequence[object]] = {
            "step": self.step,
            "tokens": self.tokens,
            "time": self.time,
        }
        for name, column in (*columns.items(), *self.values.items()):
            if len(column) != rows:
                raise Refused(
                    f"column {name} has {len(column)} entries, seq has {rows}",
                    field=f"values.{name}",
                )
        return self

    def __len__(self) -> int:
        return len(self.seq)

    @classmethod
    def from_points(cls, points: Iterable[Point | Mapping[str, Any]]) -> Self:
        """From Points, or their JSON, of one run, attempt and rank.

        Raises ValueError for points of several ranks, or none.
        """
        rows = [vars(point) if isinstance(point, Point) else point for point in points]
        if not rows:
            raise ValueError("a batch needs at least one point")
        head = (rows[0]["run"], rows[0]["attempt"], rows[0]["rank"])
        values: dict[str, list[Any]] = {}
        for i, row in enumerate(rows):
            if (row["run"], row["attempt"], row["rank"]) != head:
                raise ValueError(
                    "a batch has one rank's points, this one starts with run, attempt, rank = "
                    f"{head}"
                )
            for name, value in row["values"].items():
                column = values.get(name)
                if column is None:
                    column = values[name] = [None] * len(rows)
                column[i] = value
        columns = {key: [row[key] for row in rows] for key in ("seq", "step", "tokens", "time")}
        return cls(run=head[0], attempt=head[1], rank=head[2], values=values, **columns)

    def to_points(self) -> Iterator[Point]:
        """The points, row by row."""
        for i in range(len(self.seq)):
            yield Point.model_construct(
                run=self.run,
                attempt=self.attempt,
                rank=self.rank,
                seq=self.seq[i],
                step=self.step[i],
                tokens=self.tokens[i],
                time=self.time[i],
                values={
                    name: value
                    for name, column in self.values.items()
                    if (value := column[i]) is not None
                },
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; columns without NaN or infinity are not copied."""
        return {
            **vars(self),
            "values": {name: encode_column(column) for name, column in self.values.items()},
        }


def encode_number(value: float) -> float | str:
    """The number itself, or its name if it is not finite."""
    if value - value == 0:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def encode_column(column: Sequence[float | None]) -> Sequence[float | str | None]:
    """`encode_number` over a column; the same object if all numbers are finite."""
    # a finite sum implies finite terms; an overflow of finite terms only takes the slow path
    total = sum(value for value in column if value is not None)
    if total - total == 0:
        return column
    return [None if value is None else encode_number(value) for value in column]


def plain(data: Any) -> Any:
    """Nested plain data with `encode_number` applied to its numbers."""
    if isinstance(data, float):
        return encode_number(data)
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return [plain(value) for value in data] if isinstance(data, (list, tuple)) else data
