"""The command line that starts a run's processes under its user. Starts nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from workers.launcher.isolation.run_user import RunUser


def as_user(command: list[str], user: RunUser) -> list[str]:
    """The command under the user, without capabilities and without a way to gain rights.

    SIGKILL ends it with its supervisor: the kernel forgets that setting when the user changes.
    """
    return [
        _setpriv(),
        f"--reuid={user.uid}",
        f"--regid={user.gid}",
        f"--groups={','.join(str(gid) for gid in user.groups)}",
        "--inh-caps=-all",
        "--no-new-privs",
        "--pdeathsig=KILL",
        "--",
        *command,
    ]


def user_environment(home: Path, user: RunUser) -> dict[str, str]:
    """HOME, USER and LOGNAME; a user without an account has a folder in the node's home."""
    return {
        "HOME": str(home / "users" / str(user.uid)),
        "USER": user.name,
        "LOGNAME": user.name,
        "SHELL": os.environ.get("SHELL", "/bin/sh"),
    }


def _setpriv() -> str:
    # the search path belongs to the run's environment; the tool must not
    return shutil.which("setpriv", path="/usr/bin:/bin:/usr/sbin:/sbin") or "setpriv"
