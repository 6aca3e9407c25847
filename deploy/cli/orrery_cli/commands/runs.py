"""`orrery runs`: the list of runs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from orrery_cli.options import AsJson
from orrery_cli.output import age, model_name, number, print_items, short_plan

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)


def runs(
    state: Annotated[
        OptionalText, typer.Option(help="One or a comma-separated list: queued,running,….")
    ] = None,
    kind: Annotated[OptionalText, typer.Option(help="One or a list: train,serve,….")] = None,
    experiment: Annotated[OptionalText, typer.Option(help="Name or id.")] = None,
    tag: Annotated[OptionalText, typer.Option(help="Runs with this tag.")] = None,
    owner: Annotated[OptionalText, typer.Option(help="A username; `me` is you.")] = None,
    query: Annotated[
        OptionalText, typer.Option("--query", "-q", help="Text in name, notes, model or tags.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    from orrery_cli.client import Client

    filters = {
        "state": state,
        "kind": kind,
        "experiment": experiment,
        "tag": tag,
        "owner": owner,
        "q": query,
    }
    with Client() as client:
        rows = list(client.items("runs", most=limit, **filters))
    print_items(
        rows,
        ("id", "state", "name", "owner", "model", "plan", "step", "loss", "age"),
        lambda row: (
            row["id"],
            row["state"],
            row["name"],
            row["owner"],
            model_name(row["spec"]) or row["kind"],
            short_plan(row["plan"]),
            _steps(row["summary"]),
            number(row["summary"].get("loss")),
            age(row["created"]),
        ),
        as_json=as_json,
        empty="No runs. `orrery submit --model llama-tiny --steps 20` submits one.",
        right=("id", "step", "loss", "age"),
    )


def _steps(summary: dict[str, object]) -> str:
    step, steps = summary.get("step"), summary.get("steps")
    return "" if step is None else f"{step}/{steps}" if steps else str(step)
