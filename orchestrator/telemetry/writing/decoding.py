"""Decodes stream entries: opens envelopes with the node's secret and checks the node's attempt.

Any Redis client can write to the stream, so only data that a node sealed for an attempt placed on
it is accepted.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from orchestrator.common.stream_groups import StreamEntry
from orchestrator.dead_letters import retry_stamp
from orchestrator.dead_letters.services import dead_letter_add
from orchestrator.fleet.selectors import node_named, node_secret
from orchestrator.runs.models import Attempt
from orchestrator.telemetry.packing.chunks import batch_to_block
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.incoming import Incoming
from orchestrator.telemetry.writing.lines import Lines
from workers.contracts.base import WireContract
from workers.contracts.wire import names
from workers.contracts.wire.envelope import EnvelopeError, open_envelope
from workers.contracts.wire.points import PointBatch, ReportedEvent, Time

log = logging.getLogger(__name__)

# a node's secret changes when it joins again; an attempt's placement never changes
_CACHED_S: Final = 30.0


# of numbers that the writer will never send
Lost = list[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1, lt=2**53)]]]


class PointsPart(WireContract):
    """Points of one rank."""

    stream: Literal["points"]
    rank: int
    batch: PointBatch
    lost: Lost = []


class EventsPart(WireContract):
    """Events of one rank."""

    stream: Literal["events"]
    rank: int
    events: list[ReportedEvent]
    lost: Lost = []


class LogsPart(WireContract):
    """Consecutive log lines of one rank, or of the supervisor (-1)."""

    stream: Literal["logs"]
    rank: int
    first_seq: Annotated[int, Field(ge=0)]
    time: Time
    lines: list[str]


class Telemetry(WireContract):
    """The body of a telemetry envelope."""

    run: Annotated[str, Field(coerce_numbers_to_str=True)]
    attempt: int
    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Annotated[str, Field(coerce_numbers_to_str=True)]
    batches: list[Annotated[PointsPart | EventsPart | LogsPart, Field(discriminator="stream")]]


_BODY: TypeAdapter[Telemetry] = TypeAdapter(Telemetry)


class EntryRejected(ValueError):
    """An entry that can never be stored; `code` is the key under which it is counted."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream."""

    id: bytes
    fields: dict[bytes, bytes]
    stream: str = names.TELEMETRY

    @property
    def key(self) -> bytes:
        """Unique among the entries of all streams."""
        return self.source.key

    @property
    def source(self) -> StreamEntry:
        """Where it was read."""
        return StreamEntry(self.stream, self.id, self.fields)

    @property
    def written(self) -> float:
        """Unix seconds, by Redis's clock."""
        return int(self.id.split(b"-")[0]) / 1000


@dataclass(slots=True)
class EntryDecoder:
    """Decodes entries with cached secrets and attempts, and counts dropped entries."""

    dropped: Counter[str] = field(default_factory=Counter)
    _secrets: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    _attempts: dict[str, tuple[int, int, str, frozenset[str]]] = field(default_factory=dict)

    def decode(self, entries: list[Entry], now: float) -> tuple[Incoming, dict[Writer, str]]:
        """The entries' data, and each writer's attempt id. Drops unreadable entries.

        `now` is in Unix seconds.
        """
        incoming, attempt_ids = Incoming(), {}
        for entry in entries:
            try:
                attempt_ids.update(self._add(incoming, entry, now))
            except EntryRejected as error:
                self.drop(entry, error.code, str(error))
        return incoming, attempt_ids

    def drop(self, entry: Entry, code: str, why: str) -> None:
        """Count an entry that cannot be stored, and record it as a dead letter."""
        self.dropped[code] += 1
        dead_letter_add(
            source="telemetry",
            node=_node_of(entry),
            code=code,
            reason=why,
            message=entry.fields.get(names.FIELD_MESSAGE.encode(), b""),
            written=entry.written,
        )
        total = self.dropped.total()
        log.warning(
            "telemetry entry %s dropped (%s, %d so far): %s", entry.id.decode(), code, total, why
        )

    def _add(self, incoming: Incoming, entry: Entry, now: float) -> dict[Writer, str]:
        node = _node_of(entry)
        body = self._open(entry, node, now)
        named = entry.fields.get(names.FIELD_RUN.encode())
        if named is not None and named != body.run.encode():
            raise EntryRejected("malformed", f"an entry of run {named!r} has data of {body.run!r}")
        run_id, attempt, fence, nodes = self._attempt(body.attempt_id)
        if (body.run, body.attempt, body.fence) != (
            str(run_id),
            attempt,
            fence,
        ) or node not in nodes:
            raise EntryRejected(
                "wrong node",
                f"node {node!r} sent data of attempt {body.attempt_id}, which is not placed on it",
            )
        writers = {}
        for part in body.batches:
            writer = Writer(run_id, attempt, part.rank)
            writers[writer] = body.attempt_id
            if isinstance(part, PointsPart):
                if part.rank < 0 or part.rank != part.batch.rank:
                    raise EntryRejected(
                        "malformed",
                        f"a part of rank {part.rank} has points of rank {part.batch.rank}",
                    )
                incoming.points.append((writer, batch_to_block(part.batch)))
                incoming.lost_points.extend((writer, ends) for ends in part.lost)
            elif isinstance(part, EventsPart):
                incoming.events.append((writer, [*part.events]))
                incoming.lost_events.extend((writer, ends) for ends in part.lost)
            elif part.lines:
                incoming.lines.append((writer, Lines(part.first_seq, part.time, part.lines)))
        return writers

    def _open(self, entry: Entry, node: str, now: float) -> Telemetry:
        message = entry.fields.get(names.FIELD_MESSAGE.encode())
        if message is None:
            raise EntryRejected("malformed", f"the field {names.FIELD_MESSAGE!r} is missing")
        written = retry_stamp.first_written(entry.fields, message) or entry.written
        try:
            # checked at the time of writing: time spent in the stream does not expire it
            body: dict[str, Any] = open_envelope(
                self._secret(node, now), message, kind=names.KIND_TELEMETRY, now=written
            )
        except EnvelopeError as error:
            self._secrets.pop(node, None)
            raise EntryRejected(error.code, f"from node {node!r}: {error}") from None
        try:
            return _BODY.validate_python(body)
        except ValidationError as error:
            raise EntryRejected(
                "malformed", f"from node {node!r}: {error.errors(include_url=False)[:1]}"
            ) from None

    def _secret(self, name: str, now: float) -> bytes:
        known = self._secrets.get(name)
        if known is None or known[0] < now:
            node = node_named(name)
            if node is None:
                raise EntryRejected("unknown node", f"no node is named {name!r}")
            try:
                known = self._secrets[name] = (now + _CACHED_S, node_secret(node))
            except ValueError as error:
                raise EntryRejected("unknown node", str(error)) from None
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
                raise EntryRejected("unknown attempt", f"there is no attempt {attempt_id!r}")
            nodes = frozenset(str(share["node"]) for share in row.placement)
            if len(self._attempts) > 10_000:
                self._attempts.clear()
            known = self._attempts[attempt_id] = (row.run_id, row.number, str(row.fence), nodes)
        return known


def _node_of(entry: Entry) -> str:
    """The node that alone writes to the stream; of a shared stream, the node that is named."""
    named = entry.fields.get(names.FIELD_NODE.encode(), b"")
    return names.node_of_stream(entry.stream) or named.decode("utf-8", "replace")
