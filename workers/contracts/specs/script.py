"""The body of a script run: the user's program and the packages that it imports.

Fields and their own rules; `run` checks them with the rest of the spec.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Final

from pydantic import AfterValidator, model_validator

from workers.contracts.base import Contract, Refused

UV_LOCK: Final = "uv.lock"
MOST_MODULES: Final = 50
_LOCK_NAMES = re.compile(
    r"uv\.lock|pylock(\.[A-Za-z0-9_-]+)?\.toml|[A-Za-z0-9_.-]*requirements[A-Za-z0-9_.-]*\.txt"
)
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+/-]{0,199}")
_PYTHON = re.compile(r"python[0-9.]*")


def _check_lock(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not _LOCK_NAMES.fullmatch(path.name):
        raise Refused(
            f"{text[:80]!r} is not a lock file below the work folder",
            "Use uv.lock, pylock.toml or requirements.txt, relative to script.workdir.",
        )
    return text


def _check_module(text: str) -> str:
    if not _MODULE.fullmatch(text):
        raise Refused(f"{text[:80]!r} is not the name of a module", "Use a name such as cuda/12.4.")
    return text


def _check_python(text: str) -> str:
    if not _PYTHON.fullmatch(text):
        raise Refused(f"{text[:80]!r} is not a Python on the PATH", "Use python3 or python3.12.")
    return text


class ScriptEnvironment(Contract):
    """The packages of a script run, prepared on each node before the program starts.

    `lock` is a file of the work folder: uv.lock (next to its pyproject.toml), pylock.toml or
    requirements.txt. `node_packages`: what the lock does not name, such as torch, comes from the
    node. `modules` are loaded by `module load` first. `python` is a program on the PATH that the
    modules give; default: the node's Python.
    """

    lock: Annotated[str, AfterValidator(_check_lock)] | None = None
    node_packages: bool = True
    modules: list[Annotated[str, AfterValidator(_check_module)]] = []
    python: Annotated[str, AfterValidator(_check_python)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ScriptEnvironment:
        if len(self.modules) > MOST_MODULES:
            raise Refused(
                f"{len(self.modules)} modules are too many",
                f"Use at most {MOST_MODULES}.",
                field="modules",
            )
        if self.python is not None and not self.modules:
            raise Refused(
                f"{self.python} would be searched on the node's own PATH",
                "Load a module that has this Python, or omit python.",
                field="python",
            )
        if self.python is not None and self.lock is not None and self.node_packages:
            raise Refused(
                "packages of the node's Python do not work with another one",
                "Use node_packages false, and add torch to the lock.",
                field="node_packages",
            )
        return self


class ScriptBody(Contract):
    """A user's torchrun program: `command` follows torchrun's own arguments.

    `secrets` are variables whose values are not shown after the submit; the spec then says in
    which run each is stored, and the owner of that run can submit this text again.
    """

    command: list[str] = []
    workdir: str | None = None
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    environment: ScriptEnvironment | None = None
