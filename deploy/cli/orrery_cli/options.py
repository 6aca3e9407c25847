"""Options that several commands share, and the completion of run ids."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest runs with their names; none if the server does not answer."""
    from orrery_cli.client import Client
    from orrery_cli.errors import CliError

    try:
        with Client() as client:
            rows = list(client.items("runs", most=100))
    except CliError:
        return []
    return [
        (row["id"], f"{row['state']} {row['name']}")
        for row in rows
        if row["id"].startswith(incomplete)
    ]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RunId = Annotated[int, typer.Argument(min=1, help="Id of a run.", autocompletion=complete_run)]
RunIds = Annotated[
    list[int], typer.Argument(min=1, help="Ids of runs.", autocompletion=complete_run)
]
