"""Sends all outboxes of a run directory as telemetry envelopes and tracks acknowledgements.

Used by a living supervisor and by the agent that finishes a dead one's work.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from workers.contracts.wire.names import SUPERVISOR_RANK, acked_field
from workers.contracts.wire.node_messages import LaunchOrder
from workers.contracts.wire.points import PointBatch, plain
from workers.launcher.command import node_home
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.log_capture import LogCollector, limit_bytes
from workers.launcher.shipping.outbox import BatchMark, Outbox, share_window
from workers.launcher.shipping.redis_link import Link

DISK_FULL = "disk_full"  # event of a run whose log lines cannot be stored
DROPPED = "telemetry_dropped"  # event of a run whose points or events exceed their disk space
STREAMS = ("points", "events", "logs")
SUPERVISOR_LOGS = {"err": "../supervisor.log", "out": "../torchrun.log"}
# of one envelope; both bound the memory that a flood of lines takes
_ENVELOPE_ROWS = 20_000
_ENVELOPE_BYTES = 2 * 1024 * 1024
_REPORT_S = 10.0  # between two reports of drops of one file
_FINAL_READ_S = 0.5  # per rank and call: the exit report does not wait for a long log
_PUMP_BYTES = 4 * 1024 * 1024  # of log lines per rank and call; requests are handled in between


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
        self._disk_full = False
        self._dropped: dict[tuple[str, int], tuple[int, float]] = {}  # bytes reported, and when

    def pump(self, *, final: bool = False) -> None:
        """Collect log lines, read acknowledgements, send every stream's new lines."""
        self._open_outboxes()
        self._collect(final=final)
        self._report_drops(final=final)
        self._take_acks()
        batches: list[tuple[Outbox, BatchMark, dict[str, Any]]] = []
        rows_waiting = bytes_waiting = 0
        for (stream, rank), box in list(self._outboxes.items()):
            left = _PUMP_BYTES if stream == "logs" else float("inf")
            while left > 0 and (chunk := box.read()) is not None:
                rows, mark = chunk
                left -= mark.size
                batch = self._batch(stream, rank, rows)
                lost = _gaps(batch, box.last_sent) if stream != "logs" else []
                if batch is not None and lost:
                    batch["lost"] = lost
                # the receiver acknowledges only what it gets, so lines that are dropped must not
                # hold the mark back
                last_seq = min(mark.last_seq, _last_seq(batch, box.last_sent))
                mark = replace(mark, last_seq=last_seq)
                if batch is not None:
                    batches.append((box, mark, batch))
                    rows_waiting += len(rows)
                    bytes_waiting += mark.size
                box.sent(mark)
                if rows_waiting >= _ENVELOPE_ROWS or bytes_waiting >= _ENVELOPE_BYTES:
                    if not self._send(batches):
                        return
                    batches, rows_waiting, bytes_waiting = [], 0, 0
        if batches:
            self._send(batches)

    @property
    def behind(self) -> bool:
        """Whether a program writes lines faster than they are read; call `pump` again soon."""
        return any(collector.behind for collector in self.collectors.values())

    def outboxes(self) -> list[Outbox]:
        """The files with points and events."""
        return [box for (stream, _), box in list(self._outboxes.items()) if stream != "logs"]

    def log_collectors(self) -> list[LogCollector]:
        """The readers of the programs' output."""
        return list(self.collectors.values())

    def _report_drops(self, *, final: bool) -> None:
        """Report what was dropped to limit disk space: a gap in points or events."""
        now = time.monotonic()
        for key, box in self._outboxes.items():
            reported, at = self._dropped.get(key, (0, now - _REPORT_S))
            size = box.dropped_bytes - reported
            if not size or (now - at < _REPORT_S and not final):
                continue
            stream, rank = key
            message = (
                f"{size:,} bytes of {stream} of rank {rank} on node {self.link.node.node} were "
                "dropped: the program writes them faster than they can be stored "
                "(ORRERY_OUTBOX_MB)."
            )
            data = {"stream": stream, "bytes": size, "message": message}
            self.link.report("event", {"type": DROPPED, "rank": rank, "data": data})
            self._dropped[key] = (box.dropped_bytes, now)

    def _collect(self, *, final: bool) -> None:
        """Collect log lines. A full disk is reported once; its lines are read when there is space.

        The run continues: only a program that writes itself fails.
        """
        try:
            for collector in self.collectors.values():
                collector.collect(final=final, seconds=_FINAL_READ_S if final else None)
        except OSError as error:
            if not self._disk_full:
                self.link.report("event", {"type": DISK_FULL, "data": self._disk_event(error)})
            self._disk_full = True
        else:
            self._disk_full = False

    def _disk_event(self, error: OSError) -> dict[str, Any]:
        message = (
            f"Log lines cannot be stored on node {self.link.node.node}: {error.strerror or error} "
            f"({self.run_dir}). The run continues; free space there."
        )
        return {"node": self.link.node.node, "message": message}

    def settled(self) -> bool:
        """Whether the receiver has committed everything that was written."""
        return not self.behind and all(box.drained for box in self._outboxes.values())

    def settle(self, seconds: float, *, deadline: float) -> bool:
        """Send until everything is committed, for this long while Redis answers; whether it is.

        Time without Redis does not count, but the monotonic `deadline` ends it.
        """
        left_s, last = seconds, time.monotonic()
        while True:
            try:
                self.pump(final=True)
            except OSError:
                return True  # the disk failed this attempt
            if self.settled():
                return True
            now = time.monotonic()
            if self.link.acked() is not None:
                left_s -= now - last
            last = now
            if left_s <= 0 or now >= deadline:
                return False
            if not self.behind:
                time.sleep(0.1)

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
            with contextlib.suppress(OSError):  # on a full disk a successor repeats lines
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
                    folder,
                    SUPERVISOR_LOGS if rank == SUPERVISOR_RANK else None,
                    limit=limit_bytes(self.order.local_ranks),
                )
                for stream in STREAMS:
                    acked, offset, *_ = self._offsets.get(acked_field(stream, rank), (0, 0))
                    self._outboxes[stream, rank] = Outbox(
                        folder / f"{stream}.jsonl", offset=offset, acked=acked
                    )
                share_window(self._outboxes.values())

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


def _last_seq(batch: dict[str, Any] | None, before: int) -> int:
    """The last number in a batch; `before` if nothing of it is sent."""
    if batch is None:
        return before
    if batch["stream"] == "logs":
        return int(batch["first_seq"]) + len(batch["lines"]) - 1
    if batch["stream"] == "events":
        return int(max(event["seq"] for event in batch["events"]))
    return int(max(batch["batch"]["seq"]))


def _gaps(batch: dict[str, Any] | None, before: int) -> list[list[int]]:
    """`[first, last]` of the numbers that are missing before and between the batch's numbers."""
    if batch is None:
        return []
    if batch["stream"] == "events":
        numbers = [int(event["seq"]) for event in batch["events"]]
    else:
        numbers = [int(number) for number in batch["batch"]["seq"]]
    gaps = []
    for number in numbers:
        if number > before + 1:
            gaps.append([before + 1, number - 1])
        before = max(before, number)
    return gaps
