"""The commands by name, and the options before a command."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from orrery_cli import __version__, credentials
from orrery_cli.commands import (
    actions,
    compare,
    dashboard,
    download,
    fleet,
    import_runs,
    login,
    logs,
    plan,
    report,
    runs,
    submit,
)
from orrery_cli.commands import sweep as sweeps
from orrery_cli.commands import watch as watching

HELP = """
Submit, watch and compare runs of an Orrery server.

Exit codes: 0 done, 1 refused or unreachable, 2 usage error. `watch` and `submit --watch`:
0 finished, 1 failed, 2 usage error, 3 cancelled.
"""

app = typer.Typer(
    name="orrery",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        print(f"orrery {__version__}")
        raise typer.Exit


@app.callback()
def options(
    url: Annotated[
        Optional[str],  # noqa: UP045  (Python 3.10 with older releases of typer)
        typer.Option(help="Address of the server; default: ORRERY_URL, else the last login's."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """Take the options before the command."""
    credentials.chosen_url = url


for _name, _command in (
    ("login", login.login),
    ("logout", login.logout),
    ("submit", submit.submit),
    ("runs", runs.runs),
    ("watch", watching.watch),
    ("logs", logs.logs),
    ("cancel", actions.cancel),
    ("pause", actions.pause),
    ("resume", actions.resume),
    ("retry", actions.retry),
    ("plan", plan.plan),
    ("compare", compare.compare),
    ("nodes", fleet.nodes),
    ("queue", fleet.queue),
    ("download", download.download),
    ("import", import_runs.import_runs),
):
    app.command(_name)(_command)
app.add_typer(sweeps.app, name="sweep")
app.add_typer(report.app, name="report")
app.add_typer(dashboard.app, name="dashboard")
