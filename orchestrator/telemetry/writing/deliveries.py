"""From stream entries to news: opens envelopes with their node's secret, checks that the node runs
that attempt.

Whoever can write to Redis can write to the stream; only what a node sealed about an attempt placed
on it comes through.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from orchestrator.fleet.selectors import node_named, node_secret
from orchestrator.runs.models import Attempt
from orchestrator.telemetry.packing.chunks import block_of
from orchestrator.telemetry.services import News
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.lines import Lines
from workers.contracts.base import Contract
from workers.contracts.wire import names
from workers.contracts.wire.envelope import EnvelopeError, open_envelope
from workers.contracts.wire.points import PointBatch, RunEvent, Time

log = logging.getLogger(__name__)

# a node's secret changes when it joins anew; attempts are never placed anew
_CACHED_S: Final = 30.0


class PointsPart(Contract):
    stream: Literal["points"]
    rank: int
    batch: PointBatch


class EventsPart(Contract):
    stream: Literal["events"]
    rank: int
    events: list[RunEvent]


class LogsPart(Contract):
    stream: Literal["logs"]
    rank: int
    first_seq: Annotated[int, Field(ge=0)]
    time: Time
    lines: list[str]


class Telemetry(Contract):
    """The body of a telemetry envelope."""

    run: Annotated[str, Field(coerce_numbers_to_str=True)]
    attempt: int
    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Annotated[str, Field(coerce_numbers_to_str=True)]
    batches: list[Annotated[PointsPart | EventsPart | LogsPart, Field(discriminator="stream")]]


_BODY: TypeAdapter[Telemetry] = TypeAdapter(Telemetry)


class Dropped(ValueError):
    """An entry that will never be readable; `code` is what it is counted under."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream."""

    id: bytes
    fields: dict[bytes, bytes]

    @property
    def written(self) -> float:
        """Unix seconds, by Redis's clock."""
        return int(self.id.split(b"-")[0]) / 1000


@dataclass(slots=True)
class Opener:
    """Opens entries, remembering secrets and attempts for a while, and counts what it had to drop."""

    dropped: Counter[str] = field(default_factory=Counter)
    _secrets: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    _attempts: dict[str, tuple[int, int, str, frozenset[str]]] = field(default_factory=dict)

    def news(self, entries: list[Entry], now: float) -> tuple[News, dict[Writer, str]]:
        """What the entries say, and each writer's attempt id.

        What cannot be read is logged, counted and left out.
        """
        news, attempt_of = News(), {}
        for entry in entries:
            try:
                attempt_of.update(self._add(news, entry, now))
            except Dropped as error:
                self.drop(entry, error.code, str(error))
        return news, attempt_of

    def drop(self, entry: Entry, code: str, why: str) -> None:
        self.dropped[code] += 1
        total = self.dropped.total()
        log.warning(
            "telemetry entry %s dropped (%s, %d so far): %s", entry.id.decode(), code, total, why
        )

    def _add(self, news: News, entry: Entry, now: float) -> dict[Writer, str]:
        node = entry.fields.get(names.FIELD_NODE.encode(), b"").decode("utf-8", "replace")
        told = self._open(entry, node, now)
        run_id, attempt, fence, nodes = self._attempt(told.attempt_id)
        if (told.run, told.attempt, told.fence) != (
            str(run_id),
            attempt,
            fence,
        ) or node not in nodes:
            raise Dropped(
                "stranger",
                f"node {node!r} speaks for attempt {told.attempt_id}, which is not placed on it",
            )
        writers = {}
        for part in told.batches:
            writer = Writer(run_id, attempt, part.rank)
            writers[writer] = told.attempt_id
            if isinstance(part, PointsPart):
                if part.rank < 0 or part.rank != part.batch.rank:
                    raise Dropped(
                        "malformed", f"points of rank {part.batch.rank} come as rank {part.rank}'s"
                    )
                news.points.append((writer, block_of(part.batch)))
            elif isinstance(part, EventsPart):
                news.events.append((writer, part.events))
            elif part.lines:
                news.lines.append((writer, Lines(part.first_seq, part.time, part.lines)))
        return writers

    def _open(self, entry: Entry, node: str, now: float) -> Telemetry:
        message = entry.fields.get(names.FIELD_MESSAGE.encode())
        if message is None:
            raise Dropped("malformed", f"it has no field {names.FIELD_MESSAGE!r}")
        try:
            # valid when it was written; how long it lay here while nobody read does not matter
            body: dict[str, Any] = open_envelope(
                self._secret(node, now), message, kind=names.KIND_TELEMETRY, now=entry.written
            )
        except EnvelopeError as error:
            self._secrets.pop(node, None)
            raise Dropped(error.code, f"from node {node!r}: {error}") from None
        try:
            return _BODY.validate_python(body)
        except ValidationError as error:
            raise Dropped(
                "malformed", f"from node {node!r}: {error.errors(include_url=False)[:1]}"
            ) from None

    def _secret(self, name: str, now: float) -> bytes:
        known = self._secrets.get(name)
        if known is None or known[0] < now:
            node = node_named(name)
            if node is None:
                raise Dropped("unknown node", f"no node is called {name!r}")
            try:
                known = self._secrets[name] = (now + _CACHED_S, node_secret(node))
            except ValueError as error:
                raise Dropped("unknown node", str(error)) from None
        return known[1]

    def _attempt(self, attempt_id: str) -> tuple[int, int, str, frozenset[str]]:
        known = self._attempts.get(attempt_id)
        if known is None:
            row = (
                Attempt.objects.filter(id=int(attempt_id)).first()
                if attempt_id.isdecimal()
                else None
            )
            if row is None:
                raise Dropped("unknown attempt", f"there is no attempt {attempt_id!r}")
            nodes = frozenset(str(share["node"]) for share in row.placement)
            if len(self._attempts) > 10_000:
                self._attempts.clear()
            known = self._attempts[attempt_id] = (row.run_id, row.number, str(row.fence), nodes)
        return known
