"""Ingest for external runs: points, events, log lines, finish. Idempotent by each item's `seq`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import pydantic
from django.http import HttpRequest
from pydantic import AliasChoices, Field, WithJsonSchema, model_validator

from orchestrator.api.history import router as router  # reading and writing share addresses
from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import MAX_ID, get_run
from orchestrator.api.http.problems import refuse
from orchestrator.api.schemas.runs import IngestOut, RunOut
from orchestrator.common import clock
from orchestrator.runs import selectors
from orchestrator.runs import services as runs
from orchestrator.telemetry import services as telemetry
from workers.contracts.base import Contract, validation_problems
from workers.contracts.specs.model import Count
from workers.contracts.wire.event_bodies import body_problem
from workers.contracts.wire.points import (
    MAX_NAMES_PER_POINT,
    MAX_NAMES_PER_RUN,
    Point,
    PointBatch,
    RunEvent,
    Time,
)

MAX_ITEMS = 10_000  # per request
MAX_CELLS = 5_000_000  # names × points of a request: 40 MB as one block
_RESERVED_TYPES = frozenset(
    {
        "invalid_event",
        "metrics_dropped",
        "node_cordoned",
        "node_lost",
        "plan_resolved",
        "preflight",
        "prediction_missed",
        "preempted",
        "resize_requested",
        "resized",
        "state_changed",
    }
)


def _schema(contract: type[Contract], *required: str) -> WithJsonSchema:
    """The OpenAPI schema of an item; the path gives the other required fields.

    Items are validated one by one.
    """
    return WithJsonSchema({**contract.model_json_schema(), "required": list(required)})


class Line(Contract):
    """One line of a program's output; `seq` counts per rank from 1."""

    rank: Annotated[int, Field(ge=-1)] = 0
    seq: Count
    time: Time = 0.0
    text: Annotated[str, Field(max_length=1 << 20)]


PointItem = Annotated[dict[str, Any], _schema(Point, "seq", "values")]
EventItem = Annotated[dict[str, Any], _schema(RunEvent, "type")]
LineItem = Annotated[dict[str, Any], _schema(Line, "seq", "text")]


class _ListBody(Contract):
    """A body with one list; also accepts the bare list."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, data: Any) -> Any:
        return {next(iter(cls.model_fields)): data} if isinstance(data, list) else data


class Points(_ListBody):
    """Points to store."""

    points: Annotated[list[PointItem], Field(max_length=MAX_ITEMS)]


class Events(_ListBody):
    """Events to store."""

    events: Annotated[list[EventItem], Field(max_length=MAX_ITEMS)]


class Lines(_ListBody):
    """Log lines to store."""

    lines: Annotated[
        list[LineItem], Field(max_length=MAX_ITEMS, validation_alias=AliasChoices("lines", "logs"))
    ]


class Finish(Contract):
    """How the run ended."""

    status: Annotated[
        Literal["finished", "failed", "cancelled"],
        Field(validation_alias=AliasChoices("status", "state")),
    ] = "finished"
    reason: Annotated[str, Field(max_length=2000)] = ""


@router.post(
    "/{int:id}/points",
    response=IngestOut,
    auth=require_scope("ingest"),
    tags=["ingest"],
    summary="Store points",
)
def points(request: HttpRequest, id: int, body: Points) -> dict[str, Any]:
    """Stores up to 10,000 points, also gzipped.

    `seq` counts from 1 per attempt and rank; points that are already stored count as duplicates.
    """
    run = _external(request, id)
    _check_names(run, body.points)
    now = time.time()
    defaults = {"rank": 0, "tokens": 0, "time": now, "values": {}}
    good, rejected = validate_items(
        body.points,
        lambda item: Point.model_validate(
            {"step": item.get("seq"), **defaults, **_with_run(run, item)}
        ),
    )
    by_writer: dict[tuple[int, int], list[Point]] = {}
    for _, point in good:
        by_writer.setdefault((point.attempt, point.rank), []).append(point)
    stored: list[Any] = []
    for attempt in sorted({attempt for attempt, _ in by_writer}):
        batches = [
            PointBatch.from_points(rows)
            for (number, _), rows in sorted(by_writer.items())
            if number == attempt
        ]
        stored += telemetry.points_store(run=run, attempt=attempt, batches=batches)
    return {
        "accepted": sum(len(item.new) for item in stored),
        "duplicates": sum(item.known for item in stored),
        "rejected": rejected,
    }


@router.post(
    "/{int:id}/events",
    response=IngestOut,
    auth=require_scope("ingest"),
    tags=["ingest"],
    summary="Store events",
)
def events(request: HttpRequest, id: int, body: Events) -> dict[str, Any]:
    """Stores up to 10,000 events. An event without `seq` is stored every time it is sent."""
    run = _external(request, id)
    defaults = {"seq": 0, "time": time.time(), "data": {}}
    good, rejected = validate_items(
        body.events,
        lambda item: _event(RunEvent.model_validate({**defaults, **_with_run(run, item)})),
    )
    recorded = runs.events_record(
        run=run,
        events=[
            runs.NewEvent(
                type=event.type,
                data=event.data,
                attempt=event.attempt,
                rank=event.rank,
                time=clock.from_unix(event.time),
                origin=f"{event.attempt}/{event.rank or 0}/{event.seq}" if event.seq else None,
            )
            for _, event in good
        ],
    )
    accepted = len(recorded)
    return {"accepted": accepted, "duplicates": len(good) - accepted, "rejected": rejected}


@router.post(
    "/{int:id}/logs",
    response=IngestOut,
    auth=require_scope("ingest"),
    tags=["ingest"],
    summary="Store log lines",
)
def logs(request: HttpRequest, id: int, body: Lines) -> dict[str, Any]:
    """Stores up to 10,000 log lines. `seq` counts from 1 per rank."""
    run = _external(request, id)
    now = time.time()
    good, rejected = validate_items(
        body.lines, lambda item: Line.model_validate({"time": now, **item})
    )
    batches = [
        (rank, telemetry.Lines(chunk[0].seq, chunk[-1].time, [line.text for line in chunk]))
        for rank, chunk in _consecutive(line for _, line in good)
    ]
    stored = telemetry.logs_store(run=run, attempt=run.attempt_number, batches=batches)
    accepted = sum(len(item.new) for item in stored)
    return {"accepted": accepted, "duplicates": len(good) - accepted, "rejected": rejected}


@router.post(
    "/{int:id}/finish",
    response=RunOut,
    auth=require_scope("ingest"),
    tags=["ingest"],
    summary="Finish a run",
)
def finish(request: HttpRequest, id: int, body: Finish | None = None) -> Any:
    """Ends the run as finished, failed or cancelled."""
    run, end = _external(request, id), body or Finish()
    return selectors.serialize_run(
        runs.external_finish(run=run, status=end.status, reason=end.reason, by=user(request))
    )


def _external(request: HttpRequest, id: int) -> Any:
    run, by = get_run(request, id), user(request)
    if not runs.may_manage(run, by):
        raise refuse(
            "not-yours",
            "The run belongs to another user",
            403,
            f"Run {id} belongs to {run.owner.get_username()}; its owner and operators may write to "
            "it. Record into a run that you own.",
        )
    if run.kind != "external":
        raise refuse(
            "not-external",
            "Orrery records this run itself",
            409,
            f"Run {id} is of kind {run.kind}: its node sends its points, events and logs. Programs "
            "that Orrery did not start record into a run of kind external; a program that it "
            "started has the recorder's directory in its environment.",
        )
    if run.state == "cancelled":
        raise refuse(
            "run-cancelled",
            "The run was cancelled",
            409,
            f"Run {id} was cancelled; stop the program, or submit another run for it.",
        )
    return run


def _check_names(run: Any, items: list[dict[str, Any]]) -> None:
    """Refuse requests whose metric names exceed the limits, before any work on them."""
    names: set[str] = set()
    for index, item in enumerate(items):
        values = item.get("values")
        if not isinstance(values, dict):
            continue
        if len(values) > MAX_NAMES_PER_POINT:
            raise _too_many_names(
                f"points.{index}.values has {len(values)} names; a point has at most "
                f"{MAX_NAMES_PER_POINT}."
            )
        names.update(values)
        if len(names) > MAX_NAMES_PER_RUN:
            raise _too_many_names(
                f"The request has more than {MAX_NAMES_PER_RUN} names, the limit of a run."
            )
    if len(names) * len(items) > MAX_CELLS:
        raise _too_many_names(
            f"The request has {len(names)} names in {len(items)} points. Names times points may be "
            f"at most {MAX_CELLS}: send fewer points per request."
        )
    total = telemetry.names_after(run=run, names=names)
    if total > MAX_NAMES_PER_RUN:
        raise _too_many_names(
            f"With this request, run {run.pk} would have {total} metric names; a run has at most "
            f"{MAX_NAMES_PER_RUN}. Put changing parts such as a step or a sample's id into the "
            "value or into an event, not into the name."
        )


def _too_many_names(detail: str) -> Exception:
    return refuse("too-many-names", "Too many metric names", 422, detail)


def _with_run(run: Any, item: dict[str, Any]) -> dict[str, Any]:
    """The item with run and attempt; ValueError if it names another run or a later attempt."""
    run_id, attempt = item.get("run", run.pk), item.get("attempt", run.attempt_number)
    if str(run_id) != str(run.pk):
        raise ValueError(f"run is {run_id!r}, but the path has run {run.pk}")
    if attempt not in range(run.attempt_number + 1):
        raise ValueError(f"attempt is {attempt!r}, the run is at attempt {run.attempt_number}")
    for name in ("seq", "step", "tokens", "rank"):
        number = item.get(name)
        if isinstance(number, int) and not -1 <= number <= MAX_ID >> 1:
            raise ValueError(f"{name} is out of range")
    return {**item, "run": str(run.pk), "attempt": attempt}


def _event(event: RunEvent) -> RunEvent:
    if event.type in _RESERVED_TYPES:
        raise ValueError(f"the event type {event.type} is reserved; choose another")
    problem = body_problem(event.type, event.data)
    if problem is not None:
        raise ValueError(f"the data of {event.type} is invalid: {problem}")
    return event


def validate_items(
    items: Iterable[dict[str, Any]], read: Callable[[dict[str, Any]], Any]
) -> tuple[list[tuple[int, Any]], list[dict[str, Any]]]:
    """`(index, item)` of valid items, and `{index, message}` of the others."""
    good, rejected = [], []
    for index, item in enumerate(items):
        try:
            good.append((index, read(item)))
        except pydantic.ValidationError as error:
            rejected.append(
                {
                    "index": index,
                    "message": "; ".join(str(problem) for problem in validation_problems(error)),
                }
            )
        except ValueError as error:
            rejected.append({"index": index, "message": str(error)})
    return good, rejected


def _consecutive(lines: Iterable[Line]) -> Iterator[tuple[int, list[Line]]]:
    """Lines by rank, in chunks of consecutive numbers, without duplicates."""
    chunk: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.rank, line.seq)):
        if chunk and (line.rank, line.seq) == (chunk[-1].rank, chunk[-1].seq):
            continue
        if chunk and (line.rank, line.seq) != (chunk[-1].rank, chunk[-1].seq + 1):
            yield chunk[0].rank, chunk
            chunk = []
        chunk.append(line)
    if chunk:
        yield chunk[0].rank, chunk
