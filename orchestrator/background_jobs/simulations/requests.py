"""Requests, runs, lists and deletes a user's simulations of scheduling policies."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from django.db import DatabaseError
from django.db.models import QuerySet

from orchestrator.accounts.models import User
from orchestrator.background_jobs.models import Simulation
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, conflict, invalid, missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.scheduling.simulation import compare
from orchestrator.scheduling.simulation.traces import COLUMNS, Trace, TraceError, read_csv

log = logging.getLogger(__name__)

MOST: Final = 20  # simulations of a user; the oldest must be deleted for another one
MOST_RUNS: Final = 50_000  # per simulation; the command has no such limit
MOST_DEVICES: Final = 200_000
MOST_CSV_BYTES: Final = 5_000_000
LONGEST_S: Final = 600.0  # all policies together
_POLICIES: Final = ("fifo", "shortest_first", "fair_share", "orrery")


def simulation_request(
    *,
    by: User,
    trace: str,
    nodes: int,
    devices_per_node: int,
    policies: Sequence[str] = _POLICIES,
    csv: str = "",
) -> Simulation:
    """Queue a simulation of a synthetic trace, or of the CSV text `csv` with `trace` as its name.

    Raises 422 for a trace, size or policy that cannot be simulated, 409 beyond MOST.
    """
    setup = compare.Setup(nodes, devices_per_node, compare.parse_policies(policies))
    if problem := setup.problem():
        field = "policies" if "policy" in problem else "nodes"
        raise invalid(field, problem, "See docs/scheduling.md.")
    if setup.devices > MOST_DEVICES:
        message = f"{setup.devices:,} devices; a page simulates at most {MOST_DEVICES:,}"
        raise invalid("nodes", message, "Use manage.py simulate for a larger cluster.")
    if len(csv.encode()) > MOST_CSV_BYTES:
        raise invalid(
            "trace",
            f"the file has {len(csv.encode()) / 1e6:.1f} MB; at most {MOST_CSV_BYTES / 1e6:.0f}",
            "Use manage.py simulate for larger traces.",
        )
    runs = len(_read(trace, csv, setup.devices))
    if Simulation.objects.filter(owner=by).count() >= MOST:
        raise conflict(
            f"You have {MOST} simulations. Delete one first.", type="too-many-simulations"
        )
    return Simulation.objects.create(
        owner=by,
        trace=trace[:120],
        csv=csv,
        runs=runs,
        nodes=nodes,
        devices_per_node=devices_per_node,
        policies=list(setup.policies),
        created=clock.now(),
    )


def simulations_of(*, user: User) -> QuerySet[Simulation]:
    """The user's simulations, newest first."""
    return Simulation.objects.filter(owner=user).defer("csv").order_by("-id")


def simulation_get(*, user: User, id: int | str) -> Simulation:
    """A simulation of the user. Raises 404."""
    row = simulations_of(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("simulation", id)
    return row


def simulation_delete(*, simulation: Simulation) -> None:
    """Delete a simulation; a job that runs it drops its result."""
    simulation.delete()


def run_simulations(*, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Run what is queued, or count it."""
    queued = Simulation.objects.filter(state=Simulation.State.QUEUED).order_by("pk")
    if dry_run:
        return {"simulated": queued.count()}
    simulated = 0
    for row in queued[:10]:
        renew()
        simulated += _run(row, renew)
    return {"simulated": simulated}


def _run(row: Simulation, renew: Callable[[], None]) -> bool:
    started = last = time.monotonic()

    def check() -> None:
        nonlocal last
        now = time.monotonic()
        if now - started > LONGEST_S:
            raise TraceError(
                f"The simulation took more than {LONGEST_S:.0f} s. Use fewer runs, or "
                "manage.py simulate."
            )
        if now - last > 5:
            last = now
            renew()

    setup = compare.Setup(row.nodes, row.devices_per_node, tuple(row.policies))
    values: dict[str, Any]
    try:
        trace = _read(row.trace, row.csv, setup.devices)
        result = compare.compare_with_charts(trace, setup, renew=check)
        values = {"state": Simulation.State.DONE, "result": result}
    except DatabaseError:
        raise
    except (Refusal, TraceError) as error:
        log.warning("Simulation %s failed: %s", row.pk, error)
        values = {"state": Simulation.State.FAILED, "error": str(error)[:500]}
    mine = Simulation.objects.filter(pk=row.pk, state=Simulation.State.QUEUED)
    return bool(conditional.update(mine, finished=clock.now(), **values))


def _read(name: str, csv: str, devices: int) -> Trace:
    try:
        if csv:
            return read_csv(io.StringIO(csv), name=name, devices=devices, most_runs=MOST_RUNS)
        trace = compare.synthetic_trace(name, devices=devices, most_runs=MOST_RUNS)
    except TraceError as error:
        raise invalid("trace", str(error), f"Use the columns {', '.join(COLUMNS)}.") from None
    if trace is None:
        raise invalid(
            "trace",
            f"unknown trace {name[:80]!r}",
            "Use philly:20000:1, helios:20000:1, or a CSV file.",
        )
    return trace


def serialize_simulation(row: Simulation) -> dict[str, Any]:
    """The REST representation; `policies` holds the figures once it is done."""
    result = row.result or {}
    return {
        "id": str(row.pk),
        "trace": row.trace,
        "runs": row.runs,
        "nodes": row.nodes,
        "devices_per_node": row.devices_per_node,
        "state": row.state,
        "created": iso(row.created),
        "finished": iso(row.finished),
        "seconds": result.get("seconds"),
        "policies": result.get("policies") or {name: None for name in row.policies},
        "error": row.error,
    }
