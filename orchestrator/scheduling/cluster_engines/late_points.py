"""Sends what killed supervisors left in an engine's home, if this machine sees that home.

Otherwise the engine's next job does. A process of its own reads the home, as the user whose files
they are, because it waits for the broker. Does not read the files of a run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from django.conf import settings

from orchestrator.common import clock
from orchestrator.fleet.cluster_engines import kinds
from orchestrator.fleet.models import Engine
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.cluster_engines import homes
from orchestrator.scheduling.models import EngineJob
from workers.contracts.wire.cluster_engines.jobs import (
    IDENTITIES,
    LATE_PROGRAM,
    LATE_TOTAL_S,
    is_member_name,
)
from workers.contracts.wire.node_messages import AttemptState

log = logging.getLogger(__name__)

EVERY_S: Final = 15.0
_SETTLED: Final = timedelta(seconds=10)  # a supervisor removes its file shortly after its report
_FILES: Final = 10_000  # of a home per poll: users may write there
_AGAIN_S: Final = 600.0  # after a failure; the next job may be faster
_popen = subprocess.Popen


@dataclass(frozen=True)
class Home:
    """A home on this machine. `account`: the Unix user who owns it; None: that of this process."""

    path: Path
    owner: int | None = None
    account: pwd.struct_passwd | None = None


@dataclass
class LatePoints:
    """One sending process per engine at a time."""

    _processes: dict[int, tuple[subprocess.Popen[bytes], float]] = field(default_factory=dict)
    _due: dict[int, float] = field(default_factory=dict)
    _tried: dict[str, float] = field(default_factory=dict)

    def poll(self, engine: Engine) -> None:
        """Start sending if something is left; never waits."""
        now = time.monotonic()
        if now < self._due.get(engine.pk, 0.0) or self._is_busy(engine, now):
            return
        self._due[engine.pk] = now + EVERY_S
        self._tried = {name: at for name, at in self._tried.items() if now - at < _AGAIN_S}
        for home in _homes(engine):
            left = [one for one in _left(engine, home) if one["node"] not in self._tried]
            if left:
                self._tried |= dict.fromkeys((one["node"] for one in left), now)
                try:
                    self._processes[engine.pk] = _start(home, left), now
                except OSError as error:  # its user may not execute this Python
                    log.warning("Nothing is sent from %s: %s", home.path, error)
                    continue
                return  # other homes come next time

    def close(self) -> None:
        """End all processes; a later one repeats what they did not finish."""
        for process, _ in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def _is_busy(self, engine: Engine, now: float) -> bool:
        process, since = self._processes.get(engine.pk, (None, now))
        if process is None:
            return False
        if process.poll() is None:
            if now - since > LATE_TOTAL_S * 2:
                process.kill()
            return True
        del self._processes[engine.pk]
        return False


def _homes(engine: Engine) -> Iterator[Home]:
    """Homes of the engine on this machine: of all users with `identity: submitter`."""
    chosen = kinds.settings_of(engine)
    if getattr(chosen, "identity", "service") == "service":
        yield Home(_expanded(chosen.home, os.path.expanduser("~")))
        return
    if os.geteuid() != 0:
        return
    recent = EngineJob.objects.filter(
        engine=engine, state=EngineJob.State.ENDED, ended__gt=clock.now() - homes.LATE
    )
    owners = recent.order_by().values_list("attempt__run__owner", "attempt__run__owner__username")
    for owner, name in sorted(owners.distinct()):
        with contextlib.suppress(KeyError):
            account = pwd.getpwnam(name)
            yield Home(_expanded(chosen.home, account.pw_dir), owner, account)


def _expanded(text: str, user_home: str) -> Path:
    return Path(text.replace("$HOME", user_home, 1).replace("~", user_home, 1))


def _left(engine: Engine, home: Home) -> list[dict[str, str]]:
    """Supervisors of ended jobs whose identity is still in the home: they reported no exit."""
    try:
        with os.scandir(home.path / IDENTITIES) as entries:
            files = [entry.name for entry in itertools.islice(entries, _FILES)]
    except OSError:
        return []
    names = {file.removesuffix(".json") for file in files if file.endswith(".json")}
    names = {name for name in names if is_member_name(name) and name.startswith(f"{engine.name}.")}
    if not names:
        return []
    now = clock.now()
    ended = Attempt.objects.filter(
        state=AttemptState.EXITED,
        ended__gt=now - homes.LATE,
        engine_job__engine=engine,
        engine_job__state=EngineJob.State.ENDED,
        engine_job__ended__lt=now - _SETTLED,
        pk__in={int(name.rsplit(".", 2)[-2].removeprefix("job")) for name in names},
    )
    if home.owner is not None:
        ended = ended.filter(run__owner=home.owner)
    return [
        {"node": share["node"], "run_dir": homes.run_dir(attempt, share["node_rank"])}
        for attempt in ended.order_by("pk")
        for share in attempt.placement
        if share["node"] in names
    ]


def _start(home: Home, left: list[dict[str, str]]) -> subprocess.Popen[bytes]:
    log.info("Sending what %s supervisors left in %s", len(left), home.path)
    root = Path(settings.BASE_DIR)
    rights: Mapping[str, Any] = {}
    if home.account is not None:
        user, group = home.account.pw_uid, home.account.pw_gid
        groups = os.getgrouplist(home.account.pw_name, group)
        rights = {"user": user, "group": group, "extra_groups": groups}
    environ = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": str(root), "HOME": "/"}
    if authority := os.environ.get("ORRERY_REDIS_CA"):
        environ["ORRERY_REDIS_CA"] = authority
    process = _popen(
        [sys.executable, "-m", LATE_PROGRAM],
        cwd=root,
        env=environ,
        stdin=subprocess.PIPE,
        start_new_session=True,
        **rights,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as pipe:
        pipe.write(json.dumps({"home": str(home.path), "left": left}).encode())
    return process
