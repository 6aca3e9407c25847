"""Lease that lets one scheduler run at a time: a row taken by conditional update.

Does not depend on scheduling.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from datetime import timedelta

from django.db import IntegrityError, transaction

from orchestrator.common import clock, conditional
from orchestrator.scheduling.models import Lease

NAME = "scheduler"
# a pass over a full queue may take seconds; dead holders on this machine are detected at once
LIFE = timedelta(seconds=15)


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
