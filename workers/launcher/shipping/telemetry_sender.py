"""Sends all outboxes of a run directory as telemetry envelopes and tracks acknowledgements.

Used by a living supervisor and by the agent that finishes a dead one's work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from workers.contracts.wire.names import SUPERVISOR_RANK, acked_field
from workers.contracts.wire.node_messages import LaunchOrder
from workers.contracts.wire.points import PointBatch, plain
from workers.launcher.command import node_home
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.log_capture import LogCollector
from workers.launcher.shipping.outbox import BatchMark, Outbox
from workers.launcher.shipping.redis_link import Link

STREAMS = ("points", "events", "logs")
SUPERVISOR_LOGS = {"err": "../supervisor.log", "out": "../torchrun.log"}
_ENVELOPE_ROWS = 20_000


class TelemetrySender:
    """`pump()` sends what is new; `on_event` gets each event line once, when it is first read."""

    def __init__(
        self,
        run_dir: RunDir,
        order: LaunchOrder,
        link: Link,
        *,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self.run_dir, self.order, self.link = run_dir, order, link
        # when a point was last read, by the monotonic clock
        self.last_point: float | None = None
        self.collectors: dict[int, LogCollector] = {}
        self._on_event = on_event
        self._events_seen: dict[int, int] = {}
        self._offsets = read_json(run_dir.offsets)
        self._outboxes: dict[tuple[str, int], Outbox] = {}
        self._generation = 0
        self._saved = 0.0

    def pump(self, *, final: bool = False) -> None:
        """Collect log lines, read acknowledgements, send every stream's new lines."""
        self._open_outboxes()
        for collector in self.collectors.values():
            collector.collect(final=final)
        self._take_acks()
        batches: list[tuple[Outbox, BatchMark, dict[str, Any]]] = []
        rows_waiting = 0
        for (stream, rank), box in list(self._outboxes.items()):
            while (chunk := box.read()) is not None:
                rows, mark = chunk
                batch = self._batch(stream, rank, rows)
                if batch is not None:
                    batches.append((box, mark, batch))
                    rows_waiting += len(rows)
                box.sent(mark)
                if rows_waiting >= _ENVELOPE_ROWS:
                    if not self._send(batches):
                        return
                    batches, rows_waiting = [], 0
        if batches:
            self._send(batches)

    def settled(self) -> bool:
        """Whether the receiver has committed everything that was written."""
        return all(box.drained for box in self._outboxes.values())

    def skipped(self) -> list[str]:
        """A message for each file with lines that could not be parsed."""
        return [
            f"{box.path}: {box.skipped} lines are not valid {key[0]} and were not sent"
            for key, box in self._outboxes.items()
            if box.skipped
        ]

    def save(self) -> None:
        """Store the acknowledged offsets for a successor; stale ones only cause repeats."""
        self._saved = time.monotonic()
        offsets = {
            acked_field(*key): [box.acked, box.acked_offset] for key, box in self._outboxes.items()
        }
        write_json(self.run_dir.offsets, offsets)

    def _send(self, batches: list[tuple[Outbox, BatchMark, dict[str, Any]]]) -> bool:
        if self.link.telemetry([batch for _, _, batch in batches]):
            return True
        for box, _, _ in batches:
            box.rewind()
        return False

    def _take_acks(self) -> None:
        acked = self.link.acked()
        if acked is None:
            return
        moved = [
            box.acknowledge(acked.get(acked_field(stream, rank), 0))
            for (stream, rank), box in self._outboxes.items()
        ]
        if any(moved) and time.monotonic() - self._saved > 1.0:
            self.save()
        # after a new connection: the server may have lost its last second
        if self.link.generation != self._generation:
            self._generation = self.link.generation
            for box in self._outboxes.values():
                box.rewind()

    def _open_outboxes(self) -> None:
        """Open the outboxes of new rank folders."""
        for rank in self.run_dir.ranks():
            if rank not in self.collectors:
                folder = self.run_dir.rank(rank)
                folder.mkdir(exist_ok=True)
                self.collectors[rank] = LogCollector(
                    folder, SUPERVISOR_LOGS if rank == SUPERVISOR_RANK else None
                )
                for stream in STREAMS:
                    acked, offset = self._offsets.get(acked_field(stream, rank), (0, 0))
                    self._outboxes[stream, rank] = Outbox(
                        folder / f"{stream}.jsonl", offset=offset, acked=acked
                    )

    def _batch(self, stream: str, rank: int, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not rows:
            return None
        if stream == "logs":
            lines = [row["text"] for row in rows]
            return {
                "stream": stream,
                "rank": rank,
                "first_seq": rows[0]["seq"],
                "time": rows[-1]["time"],
                "lines": lines,
            }
        head = {"run": self.order.run, "attempt": self.order.attempt, "rank": rank}
        if stream == "points":
            self.last_point = time.monotonic()
            try:
                batch = PointBatch.from_points({**row, **head} for row in rows)
            except (ValueError, KeyError):
                good = list(self._readable(rows, head))
                if not good:
                    return None
                batch = PointBatch.from_points(good)
            return {"stream": stream, "rank": rank, "batch": batch.to_dict()}
        for row in rows:
            self._make_relative(row)
            if row["seq"] > self._events_seen.get(rank, 0):
                self._events_seen[rank] = row["seq"]
                self._on_event({**row, "rank": rank})
        return {"stream": stream, "rank": rank, "events": [plain({**row, **head}) for row in rows]}

    def _make_relative(self, row: dict[str, Any]) -> None:
        """Make the path of a checkpoint or profile relative to the node's home, which other nodes
        mount elsewhere.
        """
        data = row.get("data")
        if (
            row.get("type") in ("checkpoint_saved", "profile_saved", "memory_profile")
            and isinstance(data, dict)
            and os.path.isabs(str(data.get("path", "")))
        ):
            data["path"] = os.path.relpath(data["path"], node_home(self.run_dir, self.order))

    def _readable(
        self, rows: list[dict[str, Any]], head: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Drop lines of a foreign program that are not points, one by one."""
        for row in rows:
            try:
                PointBatch.from_points([{**row, **head}])
            except (ValueError, KeyError):
                self._outboxes["points", head["rank"]].skipped += 1
            else:
                yield {**row, **head}
