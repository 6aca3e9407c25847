"""Whether an engine answers, its version and partitions: stored for pages, read once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.common import clock
from orchestrator.common.units import iso
from orchestrator.fleet.cluster_engines import kinds
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.cluster_engines.settings import SlurmSettings
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.scheduling.cluster_engines.interface import ClusterEngine
from orchestrator.scheduling.cluster_engines.kubernetes.engine import Kubernetes
from orchestrator.scheduling.cluster_engines.slurm.engine import Slurm
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)
REFRESH_S = 60.0

_addresses: dict[int, Mapping[str, str]] = {}
_read_at: dict[int, float] = {}
_connections: dict[int, tuple[tuple[str, str], Kubernetes | Slurm]] = {}


def connect(row: EngineRow) -> ClusterEngine:
    """The engine behind a row; it keeps its connection while the row is unchanged.

    Raises ValueError for settings or credentials of another release, or EngineUnavailable.
    """
    settings = kinds.settings_of(row)
    state = (repr(row.settings), row.credentials)
    stored = _connections.get(row.pk)
    if stored is not None and stored[0] == state:
        return stored[1]
    disconnect(row.pk)
    access = engines.credentials_of(row)
    made: Kubernetes | Slurm
    if isinstance(settings, SlurmSettings):
        made = Slurm(settings, access.rest_token)
    else:
        made = Kubernetes(row.name, settings, access, broker_ca=_broker_ca(engines.redis_url(row)))
    _connections[row.pk] = state, made
    return made


def disconnect(*ids: int) -> None:
    """End the connections to these engines, or to all."""
    for key in ids or list(_connections):
        if stored := _connections.pop(key, None):
            stored[1].close()


def _broker_ca(url: str) -> str:
    """The authority of the broker's certificate, which nodes need too."""
    path = tls_options(url).get("ssl_ca_certs")
    return Path(path).read_text() if path else ""


def refresh(row: EngineRow, engine: ClusterEngine, *, force: bool = False) -> None:
    """Read version, partitions and node addresses if the last reading is old.

    Raises EngineUnavailable.
    """
    if not force and time.monotonic() - _read_at.get(row.pk, -REFRESH_S) < REFRESH_S:
        return
    capacity = engine.capacity()
    _read_at[row.pk], _addresses[row.pk] = time.monotonic(), capacity.addresses
    known = {one.name for one in capacity.partitions}
    target = kinds.KINDS[row.kind].target
    missing = [
        f"pool {pool.name} names {target} {pool.engine_settings.get(target)}"
        for pool in row.pools.all()
        if pool.engine_settings.get(target) not in known
    ]
    message = f"Not in the cluster: {', '.join(missing)}." if missing else ""
    _store(
        row,
        ok=not missing,
        message=message,
        version=capacity.version,
        partitions=[asdict(one) for one in capacity.partitions],
    )


def addresses(row: EngineRow) -> Mapping[str, str]:
    """Addresses of the engine's nodes by name, from the newest reading."""
    return _addresses.get(row.pk, {})


def answered(row: EngineRow, engine: ClusterEngine) -> None:
    """Record that the engine answers, perhaps again after an outage, and with which problem."""
    if row.status.get("problem", "") != engine.problem:
        if engine.problem:
            log.warning("Engine %s: %s", row.name, engine.problem)
        _store(row, problem=engine.problem)
    if row.status.get("down"):
        _read_at.pop(row.pk, None)  # its configuration may be new
        _store(row, ok=True, message="", down=False)
        log.info("Engine %s answers again", row.name)


def failed(row: EngineRow, message: str) -> None:
    """Record that the engine does not answer."""
    if row.status.get("message") != message[:500] or not row.status.get("down"):
        log.warning("Engine %s does not answer: %s", row.name, message)
        _store(row, ok=False, message=message[:500], down=True)


def _store(row: EngineRow, **values: Any) -> None:
    row.status = {**row.status, "time": iso(clock.now()), **values}
    row.save(update_fields=["status"])
