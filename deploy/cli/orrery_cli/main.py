"""Entry point: runs one command and returns its exit code. Imports no library for `--version`."""

from __future__ import annotations

import os
import sys

from orrery_cli import __version__

SWEEP_COMMANDS = ("start", "list", "show", "watch", "cancel")


def main() -> None:
    """Run the command of this process's arguments and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of a command: 0 done, 1 refused or unreachable, 2 usage error.

    `watch` and `submit --watch`: 0 finished, 1 failed, 2 usage error, 3 cancelled.
    """
    if arguments in (["--version"], ["-V"]):
        print(f"orrery {__version__}")
        return 0
    from orrery_cli.app import app
    from orrery_cli.errors import CliError, report

    try:
        app(args=with_subcommand(arguments), prog_name="orrery")
    except CliError as error:
        report(error, as_json="--json" in arguments)
        return error.code
    except BrokenPipeError:  # the reader of a pipe has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def with_subcommand(arguments: list[str]) -> list[str]:
    """`sweep FILE …` is `sweep start FILE …`."""
    for at, word in enumerate(arguments[:3]):  # --url may precede it
        if word == "sweep" and (at == 0 or arguments[0].startswith("--url")):
            following = arguments[at + 1 : at + 2]
            if following and following[0] not in (*SWEEP_COMMANDS, "--help", "-h"):
                return [*arguments[: at + 1], "start", *arguments[at + 1 :]]
    return arguments
