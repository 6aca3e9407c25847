"""Entries that were read from the stream and wait for their tick: each run gets an equal share.

A node's stream holds the entries of all its runs, so a run that floods it would delay the others.
Ingest therefore reads ahead, keeps the ids by run, and takes a tick's entries from all runs in
turn.
Does not depend on Redis or on the content of entries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from orchestrator.telemetry.writing.decoding import Entry
from workers.contracts.wire import names

QUANTUM_BYTES: Final = 65_536  # of a run, before it is the next run's turn
CACHE_BYTES: Final = 8_000_000  # of entries in memory; more of them are read again for their tick
MAX_ENTRIES: Final = 20_000  # ids; beyond that ingest reads no further ahead

Fetch = Callable[[list[tuple[str, bytes]]], Iterable[Entry]]  # of streams and ids


@dataclass(slots=True)
class _Waiting:
    stream: str
    id: bytes
    size: int
    entry: Entry | None  # None: to be read again

    @property
    def key(self) -> tuple[str, bytes]:
        return self.stream, self.id


@dataclass(slots=True)
class Backlog:
    """The waiting entries. `take` removes them, in the order of arrival within each run."""

    waiting_bytes: int = 0
    _ids: set[tuple[str, bytes]] = field(default_factory=set)
    _runs: OrderedDict[bytes, deque[_Waiting]] = field(default_factory=OrderedDict)
    _cached: int = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def full(self) -> bool:
        """Whether nothing more may be read ahead."""
        return len(self._ids) >= MAX_ENTRIES

    def add(self, entries: Iterable[Entry], *, first: bool = False) -> None:
        """Append entries to their runs' queues, or put them back in front (`first`)."""
        ordered = reversed([*entries]) if first else entries
        for entry in ordered:
            key = (entry.stream, entry.id)
            if key in self._ids:
                continue
            size = size_of(entry)
            cached = first or self._cached + size <= CACHE_BYTES
            waiting = _Waiting(*key, size, entry if cached else None)
            queue = self._runs.setdefault(_run_of(entry), deque())
            (queue.appendleft if first else queue.append)(waiting)
            self._ids.add(key)
            self.waiting_bytes += size
            self._cached += size if cached else 0

    def take(self, limit_bytes: int, fetch: Fetch) -> list[Entry]:
        """Entries of all runs in turn, of about `limit_bytes`; at least one if any waits.

        `fetch` reads those that are not in memory; entries that no longer exist are left out.
        """
        chosen: list[_Waiting] = []
        size = 0
        while self._runs and size < limit_bytes:
            run, queue = self._runs.popitem(last=False)
            share = 0
            while queue and share < QUANTUM_BYTES and size < limit_bytes:
                item = queue.popleft()
                chosen.append(item)
                share, size = share + item.size, size + item.size
            if queue:
                self._runs[run] = queue  # behind all others
        for item in chosen:
            self._ids.discard(item.key)
            self.waiting_bytes -= item.size
            self._cached -= item.size if item.entry is not None else 0
        missing = [item.key for item in chosen if item.entry is None]
        read = {(entry.stream, entry.id): entry for entry in fetch(missing)} if missing else {}
        entries = (item.entry or read.get(item.key) for item in chosen)
        return [entry for entry in entries if entry is not None]


def size_of(entry: Entry) -> int:
    """Bytes of the entry's envelope."""
    return len(entry.fields.get(names.FIELD_MESSAGE.encode(), b""))


def _run_of(entry: Entry) -> bytes:
    """The run that the sender names, which the decoder checks; older nodes name only themselves."""
    fields = entry.fields
    return fields.get(names.FIELD_RUN.encode()) or b"node " + fields.get(
        names.FIELD_NODE.encode(), b""
    )
