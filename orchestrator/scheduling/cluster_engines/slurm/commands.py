"""Runs Slurm's commands with a time limit and a clean environment.

The environment of the control plane holds its secrets, so no variable of it reaches a command.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from orchestrator.fleet.cluster_engines.settings import SlurmSettings
from orchestrator.scheduling.cluster_engines.interface import EngineUnavailable

_UNREACHABLE = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "communication connection failure",
    "unexpected message received",
    "slurm_persist_conn",
    "munge",
    "protocol authentication error",
    "slurm backup controller in standby mode",
)


class CommandFailed(RuntimeError):
    """A command ended with an error; `text` is what it printed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class TimedOut(EngineUnavailable):
    """A command did not end within the time limit; its effect is unknown."""


@dataclass(frozen=True)
class Commands:
    """The commands of one cluster."""

    settings: SlurmSettings

    def run(self, *words: str, stdin: str | None = None) -> str:
        """The output. Raises CommandFailed, TimedOut or EngineUnavailable."""
        program = words[0]
        if self.settings.commands:
            program = os.path.join(self.settings.commands, program)
        try:
            done = subprocess.run(
                [program, *words[1:]],
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.settings.timeout_s,
                env=self.environment(),
                cwd="/",
            )
        except FileNotFoundError:
            raise EngineUnavailable(
                f"{program} is not installed on the control plane's machine. Install Slurm's "
                "client commands, or set `commands` of the engine to their folder."
            ) from None
        except OSError as error:
            raise EngineUnavailable(f"{program} cannot be run: {error}") from None
        except subprocess.TimeoutExpired:
            raise TimedOut(
                f"{words[0]} did not answer within {self.settings.timeout_s:g} s"
            ) from None
        if done.returncode != 0:
            text = _message(done.stderr) or f"{words[0]} ended with code {done.returncode}"
            if any(part in text.lower() for part in _UNREACHABLE):
                raise EngineUnavailable(text)
            raise CommandFailed(text)
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Variables of the commands, and with sbatch of the jobs."""
        variables = {"PATH": self.settings.path, "LANG": "C.UTF-8"}
        if config := self.settings.config or os.environ.get("SLURM_CONF"):
            variables["SLURM_CONF"] = config
        return variables


def _message(stderr: str) -> str:
    """The errors without the program's name, in one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.split("error: ", 1)[1] for line in lines if "error: " in line]
    return "; ".join(dict.fromkeys(errors or lines))[:500]
