"""Device-seconds per team and person that decay with a half-life. Pure.

Slurm decays usage as U·0.5^(dt/half-life) and adds new usage every few minutes (Slurm docs,
Multifactor Priority Plugin); here devices in use are integrated exactly, so the time between
updates does not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

HALF_LIFE_S = 7 * 86400.0
_LN2 = math.log(2)


@dataclass(slots=True)
class _Account:
    used: float = 0.0  # decayed device-seconds at `time`
    rate: int = 0  # devices in use since then
    time: float = 0.0


@dataclass(slots=True)
class DecayedUsage:
    """Usage of teams and of their people; a person's usage counts within one team."""

    half_life_s: float = HALF_LIFE_S
    shares: dict[str, float] = field(default_factory=dict)  # team → weight; 1 if not named
    _accounts: dict[tuple[str, str], _Account] = field(default_factory=dict)
    _teams: set[str] = field(default_factory=set)
    # weighted usage of all teams at one time; devices in use change it only later
    _now: float = math.nan
    _by_team: dict[str, float] = field(default_factory=dict)
    _mean: float = 0.0

    def know(self, team: str) -> None:
        """Count a team among those that share the devices."""
        if team not in self._teams:
            self._teams.add(team)
            self._now = math.nan

    def change(self, team: str, person: str, devices: int, now: float) -> None:
        """Devices in use rise, or fall if negative, at `now` (seconds)."""
        self.know(team)
        for key in ((team, ""), (team, person)) if person else ((team, ""),):
            account = self._at(key, now)
            account.rate += devices

    def add(self, team: str, person: str, device_seconds: float, now: float) -> None:
        """Add past usage, decayed until `now`."""
        self.know(team)
        for key in ((team, ""), (team, person)) if person else ((team, ""),):
            self._at(key, now).used += device_seconds
        self._now = math.nan

    def of_team(self, team: str, now: float) -> float:
        """Decayed device-seconds of a team over its weight."""
        weight = self.shares.get(team, 1.0)
        return self._read((team, ""), now) / weight if weight > 0 else math.inf

    def of_person(self, team: str, person: str, now: float) -> float:
        """Decayed device-seconds of a person in a team."""
        return self._read((team, person), now)

    def excess(self, team: str, now: float) -> float:
        """How far a team's weighted usage is from the mean over teams, in −1…1; 0 if equal."""
        if now != self._now:
            self._by_team = {each: self.of_team(each, now) for each in self._teams}
            finite = [used for used in self._by_team.values() if math.isfinite(used)]
            self._mean = sum(finite) / len(finite) if finite else 0.0
            self._now = now
        mine = self._by_team.get(team, 0.0)
        if not math.isfinite(mine):
            return 1.0
        total = mine + self._mean
        return (mine - self._mean) / total if total > 0 else 0.0

    def _at(self, key: tuple[str, str], now: float) -> _Account:
        account = self._accounts.setdefault(key, _Account(time=now))
        account.used = self._read(key, now)
        account.time = max(account.time, now)
        return account

    def _read(self, key: tuple[str, str], now: float) -> float:
        account = self._accounts.get(key)
        if account is None:
            return 0.0
        passed = now - account.time
        if passed <= 0:
            return account.used
        decay = _LN2 / self.half_life_s
        retained = math.exp(-decay * passed)
        return account.used * retained + account.rate * (1 - retained) / decay
