"""Lease that lets one scheduler run at a time: a row taken by conditional update.

A thread renews it while the loop works, so a pass may take longer than the lease. Does not depend
on scheduling.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from datetime import timedelta

from django.db import DatabaseError, IntegrityError, InterfaceError, connection, transaction

from orchestrator.common import clock, conditional
from orchestrator.scheduling.models import Lease

log = logging.getLogger(__name__)

NAME = "scheduler"
LIFE = timedelta(seconds=15)  # dead holders on this machine are detected at once
RENEW_S = 5.0
STUCK_S = 300.0  # a loop without sign of life for this long loses the lease


def new_holder() -> str:
    """A unique name of this process: host, pid and a random suffix."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


def hold(holder: str, *, beat: bool = False) -> bool:
    """Take or renew the lease; False while another holds it. `beat` records a completed pass."""
    now = clock.now()
    values = {"holder": holder, "expires": now + LIFE} | ({"beat": now} if beat else {})
    if conditional.update(Lease.objects.filter(name=NAME, holder=holder), **values):
        return True
    if conditional.update(Lease.objects.filter(name=NAME, expires__lt=now), **values):
        return True
    other = Lease.objects.filter(name=NAME).values_list("holder", flat=True).first()
    if other is not None and _died_here(other):
        return conditional.update(Lease.objects.filter(name=NAME, holder=other), **values)
    try:
        with transaction.atomic():
            if not Lease.objects.filter(name=NAME).exists():
                Lease.objects.create(name=NAME, **values)
                return True
    except IntegrityError:
        pass
    return False


def release(holder: str) -> None:
    """Let the lease expire now."""
    Lease.objects.filter(name=NAME, holder=holder).update(expires=clock.now())


class Renewal:
    """Renews a held lease in a thread of its own, until `close` or until the loop is stuck.

    The loop calls `alive` at least once per pass. The thread only renews: it takes no lease that
    another scheduler holds.
    """

    def __init__(self, holder: str, *, renew_s: float = RENEW_S, stuck_s: float = STUCK_S) -> None:
        self._holder, self._renew_s, self._stuck_s = holder, renew_s, stuck_s
        self._alive_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler-lease", daemon=True)
        self._thread.start()

    def alive(self) -> None:
        """Record that the loop works."""
        self._alive_at = time.monotonic()

    def close(self) -> None:
        """Stop renewing, and wait until the thread has ended."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._renew_s):
                if time.monotonic() - self._alive_at > self._stuck_s:
                    log.error("The scheduler's loop is stuck; its lease is no longer renewed")
                    return
                try:
                    renew(self._holder)
                except (DatabaseError, InterfaceError) as error:
                    log.warning("The scheduler's lease was not renewed: %s", error)
                    connection.close()
        finally:
            connection.close()


def renew(holder: str) -> bool:
    """Extend a lease that this holder has; False if it has none."""
    row = Lease.objects.filter(name=NAME, holder=holder)
    return conditional.update(row, expires=clock.now() + LIFE)


def _died_here(holder: str) -> bool:
    """Whether the holder was a process of this machine that has exited."""
    host, pid = holder.rsplit("-", 2)[:2]
    if host != socket.gethostname()[:40] or not pid.isdecimal():
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
    return False
