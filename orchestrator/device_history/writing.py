"""Writes minutes to the database: one statement for the nodes of a batch, one per other table.

One process writes at a time (the scheduler with the lease). A minute that fails is lost as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from django.db import connection, models, transaction

from orchestrator.device_history.attribution import Attributed, Held, Place, Used, attribute
from orchestrator.device_history.gathering import NodeMinute
from orchestrator.device_history.models import (
    AttemptHour,
    IdleDevice,
    NodeReadings,
    PoolReadings,
)
from orchestrator.device_history.packing import (
    Chunk,
    Floats,
    empty,
    pack,
    summarize,
    unpack,
    with_devices,
)
from orchestrator.device_history.series import DAY_S, MINUTE_S, POOL, QUARTER_S
from orchestrator.fleet.models import Device, Node
from orchestrator.runs.models import Attempt

log = logging.getLogger(__name__)

Holders = Callable[[float, float], Sequence[Held]]

_HOUR_S: Final = 3600
_BATCH: Final = 200  # rows per statement and transaction
_SUMS: Final = ("read_s", "idle_s", "busy_s", "measured_s", "energy_j")


class Writer:
    """Holds the open quarter hour of each node and pool, and writes minute by minute."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[int, Chunk]] | None = None
        self._pools: dict[str, tuple[int, Chunk]] = {}
        self._last = 0

    def write(self, minute: int, points: Mapping[int, NodeMinute], held: Holders) -> bool:
        """Write the points of the minute that starts at `minute`; False if it is stored already."""
        if self._nodes is None:
            self._read_open()
        if minute <= self._last:
            return False
        places = _places()
        known = set(Node.objects.values_list("pk", flat=True))
        points = {node: point for node, point in points.items() if node in known}
        until = float(minute + MINUTE_S)
        result = attribute(points, places, held(float(minute), until), minute=minute)
        self._write_nodes(minute, points)
        with transaction.atomic():
            self._write_pools(minute, result.pools)
            _add_hours(minute, result.attempts)
            _replace_idle(result)
        self._last = minute
        return True

    def _read_open(self) -> None:
        rows = NodeReadings.objects.filter(open=True).values_list("node_id", "start", "data")
        self._nodes = {node: (start, unpack(data)) for node, start, data in rows.iterator()}
        pools = PoolReadings.objects.filter(open=True).values_list("pool", "start", "data")
        self._pools = {pool: (start, unpack(data)) for pool, start, data in pools}
        self._last = PoolReadings.objects.aggregate(last=models.Max("last"))["last"] or 0

    def _write_nodes(self, minute: int, points: Mapping[int, NodeMinute]) -> None:
        assert self._nodes is not None
        start = minute // QUARTER_S * QUARTER_S
        ended = {
            node: (before, chunk)
            for node, (before, chunk) in self._nodes.items()
            if before != start
        }
        self._close_nodes(ended)
        for node in ended:
            del self._nodes[node]
        at, rows = (minute - start) // MINUTE_S, []
        for node, point in points.items():
            _, chunk = self._nodes.get(node) or (start, empty(QUARTER_S // MINUTE_S))
            chunk = with_devices(chunk, point.indexes)
            _put(chunk, at, point.indexes, point.devices, point.other)
            self._nodes[node] = start, chunk
            rows.append(
                NodeReadings(
                    node_id=node, step_s=MINUTE_S, start=start, open=True, data=pack(chunk)
                )
            )
        for batch in _batches(rows):
            with transaction.atomic():
                _upsert_nodes(batch)

    def _close_nodes(self, ended: Mapping[int, tuple[int, Chunk]]) -> None:
        """Summarize quarter hours that have ended into a point of their day."""
        for batch in _batches(list(ended)):
            known = set(Node.objects.filter(pk__in=batch).values_list("pk", flat=True))
            nodes = [node for node in batch if node in known]
            days = {ended[node][0] // DAY_S * DAY_S for node in nodes}
            stored = NodeReadings.objects.filter(
                node__in=nodes, step_s=QUARTER_S, start__in=days
            ).values_list("node_id", "start", "data")
            chunks = {(node, day): unpack(data) for node, day, data in stored}
            rows = []
            for node in nodes:
                start, chunk = ended[node]
                day = start // DAY_S * DAY_S
                points = with_devices(
                    chunks.get((node, day)) or empty(DAY_S // QUARTER_S), chunk.indexes
                )
                at = (start - day) // QUARTER_S
                one = summarize(chunk.devices)[..., 0], summarize(chunk.other)[..., 0]
                _put(points, at, chunk.indexes, *one)
                rows.append(
                    NodeReadings(node_id=node, step_s=QUARTER_S, start=day, data=pack(points))
                )
            with transaction.atomic():
                _upsert_nodes(rows)
                NodeReadings.objects.filter(
                    node__in=nodes, open=True, start__in={ended[node][0] for node in nodes}
                ).update(open=False)

    def _write_pools(self, minute: int, pools: Mapping[str, list[float]]) -> None:
        start = minute // QUARTER_S * QUARTER_S
        for pool, (before, chunk) in list(self._pools.items()):
            if before != start:
                self._close_pool(pool, before, chunk)
                del self._pools[pool]
        rows = []
        for pool, sums in pools.items():
            _, chunk = self._pools.get(pool) or (
                start,
                empty(QUARTER_S // MINUTE_S, other=len(POOL)),
            )
            at = (minute - start) // MINUTE_S
            chunk.other[:, :, at] = np.asarray(sums, np.float32)[:, None]
            self._pools[pool] = start, chunk
            rows.append(
                PoolReadings(
                    pool=pool,
                    step_s=MINUTE_S,
                    start=start,
                    open=True,
                    last=minute,
                    data=pack(chunk),
                )
            )
        _upsert_pools(rows)

    def _close_pool(self, pool: str, start: int, chunk: Chunk) -> None:
        day = start // DAY_S * DAY_S
        row = PoolReadings.objects.filter(pool=pool, step_s=QUARTER_S, start=day).first()
        points = unpack(row.data) if row else empty(DAY_S // QUARTER_S, other=len(POOL))
        points.other[:, :, (start - day) // QUARTER_S] = summarize(chunk.other)[..., 0]
        _upsert_pools([PoolReadings(pool=pool, step_s=QUARTER_S, start=day, data=pack(points))])
        PoolReadings.objects.filter(pool=pool, step_s=MINUTE_S, start=start).update(open=False)


def _put(chunk: Chunk, at: int, indexes: Sequence[int], devices: Floats, other: Floats) -> None:
    rows = [chunk.indexes.index(index) for index in indexes]
    chunk.devices[rows, :, :, at] = devices
    chunk.other[:, :, at] = other


def _places() -> list[Place]:
    rows = Device.objects.order_by().values_list(
        "pk", "node_id", "index", "node__pool__name", "kind"
    )
    return [Place(pk, node, index, pool, kind == "gpu") for pk, node, index, pool, kind in rows]


def _batches(rows: list[Any]) -> Iterable[list[Any]]:
    return (rows[at : at + _BATCH] for at in range(0, len(rows), _BATCH))


def _upsert_nodes(rows: list[NodeReadings]) -> None:
    NodeReadings.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["node", "step_s", "start"],
        update_fields=["open", "data"],
    )


def _upsert_pools(rows: list[PoolReadings]) -> None:
    PoolReadings.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["pool", "step_s", "start"],
        update_fields=["open", "last", "data"],
    )


def _add_hours(minute: int, attempts: Mapping[int, Used]) -> None:
    """Add the minute to the hours of the attempts."""
    if not attempts:
        return
    known = set(Attempt.objects.filter(pk__in=attempts).values_list("pk", flat=True))
    table = AttemptHour._meta.db_table
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in _SUMS)
    statement = (
        f"INSERT INTO {table} (attempt_id, hour, {', '.join(_SUMS)})"
        f" VALUES (%s, %s, %s, %s, %s, %s, %s)"
        f" ON CONFLICT (attempt_id, hour) DO UPDATE SET {added}"
    )
    hour = minute // _HOUR_S * _HOUR_S
    with connection.cursor() as cursor:
        cursor.executemany(
            statement,
            [
                (pk, hour, *(getattr(used, name) for name in _SUMS))
                for pk, used in attempts.items()
                if pk in known
            ],
        )


def _replace_idle(result: Attributed) -> None:
    """Store which devices became idle; remove those that work, or that their attempt released.

    A device without a reading in the minute stays as it was while its attempt holds it.
    """
    stored = dict(IdleDevice.objects.values_list("device_id", "attempt_id"))
    gone = [
        device
        for device, attempt in stored.items()
        if device not in result.open
        or result.open[device] != attempt
        or (device in result.read and device not in result.idle)
    ]
    if gone:
        IdleDevice.objects.filter(pk__in=gone).delete()
    remaining = set(stored) - set(gone)
    IdleDevice.objects.bulk_create(
        [
            IdleDevice(
                device_id=device, attempt_id=attempt, since=datetime.fromtimestamp(since, UTC)
            )
            for device, (attempt, since) in result.idle.items()
            if device not in remaining
        ],
        ignore_conflicts=True,
        batch_size=_BATCH,
    )
