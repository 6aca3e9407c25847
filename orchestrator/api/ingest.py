"""Points, events, log lines and the end of runs that Orrery did not start. Idempotent by each
item's `seq`.

Tells per item what was refused; who stores and shows them, telemetry and runs know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import pydantic
from django.http import HttpRequest
from pydantic import AliasChoices, Field, WithJsonSchema, model_validator

from orchestrator.api.history import router as router  # reading and writing share addresses
from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.lookup import LARGEST, run_of
from orchestrator.api.http.problems import refuse
from orchestrator.api.schemas import IngestOut, RunOut
from orchestrator.common import clock
from orchestrator.runs import selectors
from orchestrator.runs import services as runs
from orchestrator.telemetry import services as telemetry
from workers.contracts.base import Contract, problems_of
from workers.contracts.specs.model import Count
from workers.contracts.wire.points import Point, PointBatch, RunEvent, Time

MOST = 10_000  # items a call
_OURS = frozenset({"state_changed", "plan_resolved", "prediction_missed", "preempted", "node_lost"})


def _shown(contract: type[Contract], *required: str) -> WithJsonSchema:
    """How an item looks in OpenAPI: its contract, of which the address tells a part.

    Each is validated on its own.
    """
    return WithJsonSchema({**contract.model_json_schema(), "required": list(required)})


class Line(Contract):
    """One line of a program's output; `seq` counts per rank from 1."""

    rank: Annotated[int, Field(ge=-1)] = 0
    seq: Count
    time: Time = 0.0
    text: Annotated[str, Field(max_length=1 << 20)]


PointItem = Annotated[dict[str, Any], _shown(Point, "seq", "values")]
EventItem = Annotated[dict[str, Any], _shown(RunEvent, "type")]
LineItem = Annotated[dict[str, Any], _shown(Line, "seq", "text")]


class _Listed(Contract):
    """A body of one list, which may also come without its name."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, data: Any) -> Any:
        return {next(iter(cls.model_fields)): data} if isinstance(data, list) else data


class Points(_Listed):
    points: Annotated[list[PointItem], Field(max_length=MOST)]


class Events(_Listed):
    events: Annotated[list[EventItem], Field(max_length=MOST)]


class Lines(_Listed):
    lines: Annotated[
        list[LineItem], Field(max_length=MOST, validation_alias=AliasChoices("lines", "logs"))
    ]


class Finish(Contract):
    status: Annotated[
        Literal["finished", "failed", "cancelled"],
        Field(validation_alias=AliasChoices("status", "state")),
    ] = "finished"
    reason: Annotated[str, Field(max_length=2000)] = ""


@router.post(
    "/{int:id}/points",
    response=IngestOut,
    auth=needs("ingest"),
    tags=["ingest"],
    summary="Store metrics of steps",
)
def points(request: HttpRequest, id: int, body: Points) -> dict[str, Any]:
    """`seq` counts per attempt and rank; what came before is counted as duplicate.

    Gzip is welcome.
    """
    run = _external(request, id)
    now = time.time()
    defaults = {"rank": 0, "tokens": 0, "time": now, "values": {}}
    good, rejected = _sorted_out(
        body.points,
        lambda item: Point.model_validate(
            {"step": item.get("seq"), **defaults, **_placed(run, item)}
        ),
    )
    by_writer: dict[tuple[int, int], list[Point]] = {}
    for _, point in good:
        by_writer.setdefault((point.attempt, point.rank), []).append(point)
    stored: list[Any] = []
    for attempt in sorted({attempt for attempt, _ in by_writer}):
        batches = [
            PointBatch.from_points(rows)
            for (of, _), rows in sorted(by_writer.items())
            if of == attempt
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
    auth=needs("ingest"),
    tags=["ingest"],
    summary="Store what happened",
)
def events(request: HttpRequest, id: int, body: Events) -> dict[str, Any]:
    """An event without `seq` is taken as new each time it comes."""
    run = _external(request, id)
    defaults = {"seq": 0, "time": time.time(), "data": {}}
    good, rejected = _sorted_out(
        body.events,
        lambda item: _event(RunEvent.model_validate({**defaults, **_placed(run, item)})),
    )
    made = runs.events_record(
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
    accepted = len(made)
    return {"accepted": accepted, "duplicates": len(good) - accepted, "rejected": rejected}


@router.post(
    "/{int:id}/logs",
    response=IngestOut,
    auth=needs("ingest"),
    tags=["ingest"],
    summary="Store log lines",
)
def logs(request: HttpRequest, id: int, body: Lines) -> dict[str, Any]:
    run = _external(request, id)
    now = time.time()
    good, rejected = _sorted_out(
        body.lines, lambda item: Line.model_validate({"time": now, **item})
    )
    batches = [
        (rank, telemetry.Lines(piece[0].seq, piece[-1].time, [line.text for line in piece]))
        for rank, piece in _consecutive(line for _, line in good)
    ]
    stored = telemetry.logs_store(run=run, attempt=run.attempt_number, batches=batches)
    accepted = sum(len(item.new) for item in stored)
    return {"accepted": accepted, "duplicates": len(good) - accepted, "rejected": rejected}


@router.post(
    "/{int:id}/finish",
    response=RunOut,
    auth=needs("ingest"),
    tags=["ingest"],
    summary="Tell how the run ended",
)
def finish(request: HttpRequest, id: int, body: Finish | None = None) -> Any:
    run, told = _external(request, id), body or Finish()
    return selectors.run_answer(
        runs.external_finish(run=run, status=told.status, reason=told.reason, by=user(request))
    )


def _external(request: HttpRequest, id: int) -> Any:
    run, who = run_of(request, id), user(request)
    if not runs.may_manage(run, who):
        raise refuse(
            "not-yours",
            "The run is somebody else's",
            403,
            f"Run {id} is {run.owner.get_username()}'s; its owner and operators may write to it. "
            "Record into a run of "
            "your own.",
        )
    if run.kind != "external":
        raise refuse(
            "not-external",
            "Orrery feeds this run itself",
            409,
            f"Run {id} is of kind {run.kind}: its node brings its points, events and logs. "
            "Programs that Orrery did "
            "not start record into a run of kind external; one that it did finds the recorder's "
            "directory in its "
            "environment.",
        )
    if run.state == "cancelled":
        raise refuse(
            "run-cancelled",
            "The run was cancelled",
            409,
            f"Run {id} was cancelled; stop the program, or submit another run for it.",
        )
    return run


def _placed(run: Any, item: dict[str, Any]) -> dict[str, Any]:
    """The item with run and attempt; raises ValueError where it names others than the address and
    the run have.
    """
    given, attempt = item.get("run", run.pk), item.get("attempt", run.attempt_number)
    if str(given) != str(run.pk):
        raise ValueError(f"run is {given!r}, the address says {run.pk}")
    if attempt not in range(run.attempt_number + 1):
        raise ValueError(f"attempt is {attempt!r}, the run is at attempt {run.attempt_number}")
    for name in ("seq", "step", "tokens", "rank"):
        number = item.get(name)
        if isinstance(number, int) and not -1 <= number <= LARGEST >> 1:
            raise ValueError(f"{name} is out of range")
    return {**item, "run": str(run.pk), "attempt": attempt}


def _event(event: RunEvent) -> RunEvent:
    if event.type in _OURS:
        raise ValueError(f"events of type {event.type} are Orrery's own; choose another word")
    return event


def _sorted_out(
    items: Iterable[dict[str, Any]], read: Callable[[dict[str, Any]], Any]
) -> tuple[list[tuple[int, Any]], list[dict[str, Any]]]:
    """`(index, item)` of those that can be read, and a sentence for each that cannot."""
    good, rejected = [], []
    for index, item in enumerate(items):
        try:
            good.append((index, read(item)))
        except pydantic.ValidationError as error:
            rejected.append(
                {"index": index, "message": "; ".join(str(found) for found in problems_of(error))}
            )
        except ValueError as error:
            rejected.append({"index": index, "message": str(error)})
    return good, rejected


def _consecutive(lines: Iterable[Line]) -> Iterator[tuple[int, list[Line]]]:
    """Lines by rank, in pieces whose numbers follow each other."""
    piece: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.rank, line.seq)):
        if piece and (line.rank, line.seq) == (piece[-1].rank, piece[-1].seq):
            continue
        if piece and (line.rank, line.seq) != (piece[-1].rank, piece[-1].seq + 1):
            yield piece[0].rank, piece
            piece = []
        piece.append(line)
    if piece:
        yield piece[0].rank, piece
