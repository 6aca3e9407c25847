"""`orrery dashboard`: list dashboards, export them as JSON files and import such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from orrery_cli import spec_input
from orrery_cli.errors import USAGE, CliError
from orrery_cli.options import AsJson
from orrery_cli.output import age, print_items, print_json

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)
OptionalInt = Optional[int]  # noqa: UP045
DashboardId = Annotated[int, typer.Argument(min=1, help="Id of a dashboard.")]
OfRun = Annotated[OptionalInt, typer.Option("--run", min=1, help="Id of its run.")]
OfExperiment = Annotated[
    OptionalInt, typer.Option("--experiment", min=1, help="Id of its experiment.")
]
OfTeam = Annotated[OptionalInt, typer.Option("--team", min=1, help="Id of its team.")]

app = typer.Typer(help="Copy dashboards to and from JSON files.", no_args_is_help=True)


@app.command("list")
def listed(
    query: Annotated[OptionalText, typer.Option("--query", "-q", help="Part of a name.")] = None,
    run: OfRun = None,
    experiment: OfExperiment = None,
    team: OfTeam = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List dashboards, newest first."""
    from orrery_cli.client import Client

    with Client() as client:
        wanted = {"q": query, "run": run, "experiment": experiment, "team": team}
        rows = list(client.items("dashboards", most=limit, **wanted))
    print_items(
        rows,
        ("id", "name", "shows", "panels", "owner", "changed"),
        lambda row: (
            row["id"],
            row["name"],
            subject(row),
            len(row["document"]["panels"]),
            row["owner"],
            age(row["updated"]),
        ),
        as_json=as_json,
        empty="No dashboards. `orrery dashboard import FILE` creates one.",
        right=("id", "panels", "changed"),
    )


@app.command("export")
def export(
    dashboard: DashboardId,
    output: Annotated[OptionalText, typer.Option("--output", "-o", help="File to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a dashboard as JSON, to standard output or a file, as `import` reads it."""
    from orrery_cli.client import Client

    with Client() as client:
        row = client.get(f"dashboards/{dashboard}")
    document = {"name": row["name"], "document": row["document"]}
    if output is None:
        print_json(document)
        return
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror}", code=USAGE) from None
    if as_json:
        print_json({"file": output, "id": row["id"], "version": row["version"]})
    else:
        print(f"dashboard {row['id']} {row['name']}: {output}")


@app.command("import")
def import_dashboard(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON of export; - for stdin.")],
    name: Annotated[OptionalText, typer.Option(help="Default: the name in the file.")] = None,
    run: OfRun = None,
    experiment: OfExperiment = None,
    team: OfTeam = None,
    replace: Annotated[
        OptionalInt, typer.Option(min=1, help="Id of a dashboard to replace.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a dashboard from a JSON file, or replace one.

    The file holds `{name, document}` or the document alone. Without --run, --experiment and
    --team the dashboard is yours alone.
    """
    from orrery_cli.client import Client

    read = spec_input.read_document(file)
    is_whole = "document" in read
    body: dict[str, Any] = {"document": read["document"] if is_whole else read}
    if name or (is_whole and read.get("name")):
        body["name"] = name or read["name"]
    of = {"run": run, "experiment": experiment, "team": team}
    given = {key: value for key, value in of.items() if value is not None}
    if replace is not None and given:
        option = next(iter(given))
        raise CliError(f"--replace and --{option} exclude each other", "Use one.", code=USAGE)
    with Client() as client:
        if replace is not None:
            row = client.change(f"dashboards/{replace}", body)
        else:
            row = client.create("dashboards", {"name": "Dashboard", **body, **given})
        if as_json:
            print_json(row)
            return
        print(f"dashboard {row['id']} {row['name']}: {len(row['document']['panels'])} panels")
        print(f"{client.url}/dashboards/{row['id']}/")


def subject(row: dict[str, Any]) -> str:
    """What a dashboard belongs to, in words: `run 12`, or `your newest runs`."""
    for kind in ("run", "experiment", "team"):
        if row[kind] is not None:
            return f"{kind} {row[kind]}"
    return "your newest runs"
