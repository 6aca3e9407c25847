"""Under which Unix user a run executes, from the setting ORRERY_RUN_AS and the run's owner.

Each user has a number of their own, the same on all nodes, or an account that the administrator
created. Each run has a group of its own; who may use its checkpoints gets that group. Starts
nothing and changes no file.
"""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from typing import Any, Final

# 1879048192 to 2147483647 are assigned to no use (systemd's list of UIDs and GIDs)
FIRST_UID: Final = 1_880_000_000
LAST_UID: Final = 1_899_999_999
FIRST_RUN_GID: Final = 1_900_000_000
LAST_RUN_GID: Final = 2_147_483_000
HINT = "Use uids, uids:FIRST-LAST, account:NAME (with {user} for the user's name), or agent."


class NoRunUser(ValueError):
    """ORRERY_RUN_AS is wrong, or names no user for this run; the message says why."""


@dataclass(frozen=True)
class RunUser:
    """The user of one attempt's processes; `groups` includes those of the runs that it reads."""

    uid: int
    gid: int
    name: str
    groups: tuple[int, ...]
    run_gid: int

    def to_argument(self) -> str:
        """One text, as an argument of the supervisor."""
        numbers = (self.uid, self.gid, self.run_gid, *self.groups)
        return f"{self.name}:{','.join(str(number) for number in numbers)}"

    @classmethod
    def from_argument(cls, text: str) -> RunUser:
        """The user that `to_argument` describes."""
        name, _, numbers = text.rpartition(":")
        uid, gid, run_gid, *groups = (int(number) for number in numbers.split(","))
        return cls(uid, gid, name, tuple(groups), run_gid)


@dataclass(frozen=True)
class RunAs:
    """The setting: `method` is agent, uids or account; `first` to `last` are the user numbers."""

    method: str
    account: str = ""
    first: int = FIRST_UID
    last: int = LAST_UID

    @classmethod
    def parse(cls, text: str) -> RunAs:
        """Read ORRERY_RUN_AS. Raises NoRunUser."""
        method, _, rest = text.strip().partition(":")
        if method == "agent" and not rest:
            return cls("agent")
        if method == "account" and re.fullmatch(r"[a-z_{][a-zA-Z0-9_.{}-]*", rest):
            return cls("account", account=rest)
        span = re.fullmatch(r"([0-9]+)-([0-9]+)", rest)
        if method == "uids" and not rest:
            return cls("uids")
        if method == "uids" and span and 1000 <= int(span[1]) <= int(span[2]) < 2**32 - 2:
            return cls("uids", first=int(span[1]), last=int(span[2]))
        raise NoRunUser(f"ORRERY_RUN_AS is {text!r}; set it to {HINT}.")

    def user(self, owner: dict[str, Any] | None, run: str, reads: tuple[str, ...]) -> RunUser:
        """The user of a run of `owner` (`{id, name}`) that reads these runs. Raises NoRunUser."""
        groups = tuple(dict.fromkeys(run_gid(number) for number in (run, *reads)))
        if self.method == "account":
            return self._account(owner, groups)
        if owner is None:
            raise NoRunUser(
                "The order does not name the run's owner; upgrade the control plane, or set "
                "ORRERY_RUN_AS to an account."
            )
        uid = self.first + int(owner["id"])
        if uid > self.last:
            raise NoRunUser(
                f"User {owner['id']} is beyond the range {self.first}-{self.last} of "
                "ORRERY_RUN_AS; set a larger one."
            )
        return RunUser(uid, uid, f"orrery-{int(owner['id'])}", groups, groups[0])

    def _account(self, owner: dict[str, Any] | None, groups: tuple[int, ...]) -> RunUser:
        name = self.account.replace("{user}", str((owner or {}).get("name", "")))
        try:
            entry = pwd.getpwnam(name)
        except (KeyError, ValueError):
            raise NoRunUser(
                f"This node has no account {name!r} (ORRERY_RUN_AS={self.account}); create it."
            ) from None
        if entry.pw_uid == 0:
            raise NoRunUser(f"Account {name!r} is root; runs do not execute as root.")
        own = os.getgrouplist(name, entry.pw_gid)
        all_groups = tuple(dict.fromkeys((*groups, *(gid for gid in own if gid != 0))))
        return RunUser(entry.pw_uid, entry.pw_gid, name, all_groups, groups[0])


def run_gid(run: str) -> int:
    """The group of a run. Raises NoRunUser for a number that has none."""
    if not run.isascii() or not run.isdecimal():
        raise NoRunUser(f"Run {run!r} has no number, so it has no group.")
    gid = FIRST_RUN_GID + int(run)
    if gid > LAST_RUN_GID:
        raise NoRunUser(f"Run {run} has a number above {LAST_RUN_GID - FIRST_RUN_GID}.")
    return gid
