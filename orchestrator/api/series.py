"""GET runs/{id}/series: metric names, one metric downsampled or raw, as JSON or CSV."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from ninja import Query, Router
from pydantic import Field

from orchestrator.api.http.auth import require_scope
from orchestrator.api.http.lookup import MAX_ID, get_run
from orchestrator.api.http.responses import JSON, json_response, stream_response, wants_csv
from orchestrator.api.schemas.runs import CurvesOut, SeriesNames, SeriesOut
from orchestrator.common.units import csv_text
from orchestrator.telemetry import selectors
from workers.contracts.base import Contract
from workers.contracts.catalog.metrics import run_metric_unit
from workers.contracts.wire.points import encode_number

router = Router(tags=["telemetry"])
CSV = "text/csv; charset=utf-8"
_ROWS = 4096  # points per chunk of a stream


class SeriesQuery(Contract):
    """The requested metric. `from` and `to` are in units of the axis `x`."""

    name: Annotated[
        str | None, Field(max_length=120, description="a metric; default: list the metrics")
    ] = None
    rank: Annotated[
        int | None,
        Field(ge=0, le=MAX_ID, description="default: one point per step, of the lowest rank"),
    ] = None
    attempt: Annotated[
        int | None, Field(ge=0, le=MAX_ID, description="default: the newest attempt per step")
    ] = None
    x: Literal["step", "time", "tokens", "flops"] = "step"
    points: Annotated[int, Field(ge=1, le=5000, description="maximum; spikes are retained")] = 1500
    from_: Annotated[float | None, Field(alias="from")] = None
    to: float | None = None
    after_seq: Annotated[
        int | None, Field(ge=0, le=MAX_ID, description="only points after this seq")
    ] = None
    raw: Annotated[bool, Field(description="every point, without downsampling")] = False


@router.get(
    "/{int:id}/series",
    response=SeriesOut | SeriesNames,
    auth=require_scope("read"),
    summary="Get a metric",
    openapi_extra={"responses": {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}},
)
def series(request: HttpRequest, id: int, wanted: Query[SeriesQuery]) -> HttpResponseBase:
    """A metric over steps, time, tokens or FLOPs; minimum and maximum survive downsampling.

    CSV with `Accept: text/csv`. A metric without points returns empty lists.
    """
    run, csv = get_run(request, id), wants_csv(request)
    if wanted.name is None:
        return _names(run, csv)
    chosen = {
        "run": run,
        "name": wanted.name,
        "rank": wanted.rank,
        "attempt": wanted.attempt,
        "x": wanted.x,
        "from_": wanted.from_,
        "to": wanted.to,
        "after_seq": wanted.after_seq,
    }
    if wanted.raw:
        rows = selectors.series_raw(**chosen)
        return (
            stream_response(request, _raw_csv(rows), CSV)
            if csv
            else stream_response(request, _raw_json(rows, chosen), JSON)
        )
    answer = selectors.series(**chosen, points=wanted.points)
    return _csv(answer) if csv else json_response(answer.to_dict())


class CurvesQuery(Contract):
    """The requested metrics. `from` and `to` are in units of the axis `x`."""

    name: Annotated[
        list[Annotated[str, Field(max_length=120)]],
        Field(min_length=1, max_length=40, description="metrics; repeat the parameter"),
    ]
    rank: Annotated[
        int | None,
        Field(ge=0, le=MAX_ID, description="default: one point per step, of the lowest rank"),
    ] = None
    x: Literal["step", "time", "tokens", "flops"] = "step"
    points: Annotated[int, Field(ge=1, le=5000, description="maximum of each metric")] = 1500
    from_: Annotated[float | None, Field(alias="from")] = None
    to: float | None = None
    digits: Annotated[
        int | None, Field(ge=3, le=17, description="significant digits of y; default: all")
    ] = None


@router.get(
    "/{int:id}/curves",
    response=CurvesOut,
    auth=require_scope("read"),
    summary="Get several metrics",
)
def curves(request: HttpRequest, id: int, wanted: Query[CurvesQuery]) -> HttpResponse:
    """Up to 40 metrics in one response, each as `series` returns it, for pages with many charts."""
    run = get_run(request, id)
    items = []
    for name in wanted.name:
        answer = selectors.series(
            run=run,
            name=name,
            rank=wanted.rank,
            x=wanted.x,
            points=wanted.points,
            from_=wanted.from_,
            to=wanted.to,
        ).to_dict()
        if wanted.digits is not None:
            for column in ("y", "low", "high"):
                if answer.get(column) is not None:
                    answer[column] = [float(f"{y:.{wanted.digits}g}") for y in answer[column]]
        items.append(answer)
    return json_response({"items": items})


def _names(run: Any, csv: bool) -> HttpResponse:
    items = [entry.to_dict() for entry in selectors.series_index(run=run)]
    if csv:
        lines = [
            "name,unit,points",
            *(
                f"{_cell(item['name'])},{_cell(item['unit'] or '')},{item['points']}"
                for item in items
            ),
        ]
        return HttpResponse("\n".join(lines) + "\n", content_type=CSV)
    return json_response({"items": items, "next_cursor": None})


def _csv(answer: Any) -> HttpResponse:
    low, high = answer.low or answer.y, answer.high or answer.y
    lines = [f"{answer.axis},{_cell(answer.name)},low,high"]
    lines += [
        f"{x!r},{y!r},{a!r},{b!r}" for x, y, a, b in zip(answer.x, answer.y, low, high, strict=True)
    ]
    return HttpResponse("\n".join(lines) + "\n", content_type=CSV)


def _raw_csv(rows: Iterator[tuple[Any, ...]]) -> Iterator[bytes]:
    head = "attempt,rank,seq,step,tokens,time,value\n"
    for batch in _batches(rows):  # the first batch is read before anything is sent, so it can fail
        yield (head + "".join(f"{','.join(map(repr, row))}\n" for row in batch)).encode()
        head = ""
    yield head.encode()


def _raw_json(rows: Iterator[tuple[Any, ...]], chosen: dict[str, Any]) -> Iterator[bytes]:
    """The response of `series` with every point: streams x, buffers y (8 bytes per point)."""
    head = {name: chosen[name] for name in ("name", "rank", "attempt")}
    head |= {"unit": run_metric_unit(chosen["name"], chosen["run"].spec), "axis": chosen["x"]}
    column = {"step": 3, "tokens": 4, "flops": 4, "time": 5}[chosen["x"]]
    per_token = selectors.run_flops_per_token(chosen["run"]) if chosen["x"] == "flops" else 1
    values, newest, last_seq, comma = array("d"), (0, 0), 0, ""
    yield f'{json.dumps(head)[:-1]}, "x": ['.encode()
    for batch in _batches(rows):
        positions = [row[column] * per_token for row in batch]
        values.extend(row[6] for row in batch)
        for attempt, rank, seq, *_ in batch:
            if (attempt, -rank) >= newest or not last_seq:
                newest, last_seq = (attempt, -rank), seq
        yield f"{comma}{json.dumps(positions)[1:-1]}".encode()
        comma = ", "
    yield b'], "y": ['
    comma = ""
    for start in range(0, len(values), _ROWS):
        part = [encode_number(value) for value in values[start : start + _ROWS]]
        yield f"{comma}{json.dumps(part)[1:-1]}".encode()
        comma = ", "
    yield f'], "total_points": {len(values)}, "last_seq": {last_seq}}}'.encode()


def _batches(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while batch := list(itertools.islice(rows, _ROWS)):
        yield batch


def _cell(text: str) -> str:
    """Quoted if CSV requires it (RFC 4180); no text that a spreadsheet runs as a formula."""
    text = csv_text(text)
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text
