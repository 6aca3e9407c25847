"""`orrery watch`: progress of a run until it ends."""

from __future__ import annotations

from typing import Annotated

import typer

from orrery_cli.options import AsJson, RunId
from orrery_cli.watching import INTERVAL_S, PATIENCE_S, watch_run


def watch(
    run: RunId,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two requests.")
    ] = INTERVAL_S,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a server that does not answer.")
    ] = PATIENCE_S,
    as_json: AsJson = False,
) -> None:
    """Watch a run to its end. Exit code: 0 finished, 1 failed, 2 usage error, 3 cancelled."""
    from orrery_cli.client import Client

    with Client() as client:
        code = watch_run(client, run, interval_s=interval, patience_s=patience, as_json=as_json)
    raise typer.Exit(code)
