"""Electricity of runs: kWh at the site, estimated CO2, and sums by team, person or experiment.

Only devices whose power was measured count; the share of measured device time says how many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.conf import settings

from orchestrator.accounts import selectors as accounts
from orchestrator.accounts.models import User
from orchestrator.common.errors import invalid
from orchestrator.device_history import selectors as history
from orchestrator.device_history.selectors import RunUse, Use

GROUPS: Final = ("team", "person", "experiment", "run")
_J_PER_KWH: Final = 3.6e6


def site_kwh(energy_j: float) -> float | None:
    """The site's kWh for the machines' joules, times the PUE; None if no power was measured."""
    return round(energy_j / _J_PER_KWH * float(settings.ENV.pue), 6) if energy_j else None


def co2_kg(energy_j: float) -> float | None:
    """Estimated kilograms of CO2 of the site's energy; None if no power was measured."""
    kwh = site_kwh(energy_j)
    return None if kwh is None else round(kwh * float(settings.ENV.co2_g_per_kwh) / 1000, 6)


@dataclass(frozen=True)
class EnergyRow:
    """Use of one group; `key` is a name, or a run's number; empty: without team or experiment."""

    key: str
    use: Use
    name: str = ""  # of a run
    person: str = ""  # of a run

    def to_dict(self) -> dict[str, object]:
        """Data of the REST response."""
        return {
            "key": self.key,
            "name": self.name,
            "person": self.person,
            "device_s": round(self.use.read_s, 3),
            "idle_s": round(self.use.idle_s, 3),
            "utilization": self.utilization,
            "measured_s": round(self.use.measured_s, 3),
            "energy_kwh": site_kwh(self.use.energy_j),
            "co2_kg": co2_kg(self.use.energy_j),
        }

    @property
    def utilization(self) -> float | None:
        """The mean over the device time with readings; None without any."""
        return round(self.use.busy_s / self.use.read_s, 4) if self.use.read_s else None


def report(
    *, user: User, since: datetime, until: datetime, by: str
) -> tuple[list[EnergyRow], EnergyRow]:
    """Rows, most energy first, then idle time, and the total of the people whose runs a user sees.

    A person in several teams counts for each of them. Raises Refusal 422 for an unknown group.
    """
    if by not in GROUPS:
        raise invalid("by", f"{by!r} is not a group", ", ".join(GROUPS))
    owners = accounts.visible_owners(user)
    runs = history.use_of_runs(since=since, until=until, owners=owners)
    total = sum((run.use for run in runs), Use())
    rows = _runs(runs) if by == "run" else _groups(runs, by)
    rows.sort(key=lambda row: (-row.use.energy_j, -row.use.idle_s, row.key))
    return rows, EnergyRow("", total)


def _runs(runs: Iterable[RunUse]) -> list[EnergyRow]:
    return [EnergyRow(str(run.run), run.use, run.name, run.username) for run in runs]


def _groups(runs: list[RunUse], by: str) -> list[EnergyRow]:
    teams = accounts.team_names({run.owner for run in runs}) if by == "team" else {}
    sums: dict[str, Use] = {}
    for run in runs:
        names = {
            "team": teams.get(run.owner) or [""],
            "person": [run.username],
            "experiment": [run.experiment],
        }[by]
        for name in names:
            sums[name] = sums.get(name, Use()) + run.use
    return [EnergyRow(name, use) for name, use in sums.items()]
