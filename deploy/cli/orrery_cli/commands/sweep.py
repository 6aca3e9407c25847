"""`orrery sweep`: start, list, show, watch and cancel sweeps."""

from __future__ import annotations

import time
from typing import Annotated, Any, Optional

import typer

from orrery_cli import spec_input
from orrery_cli.errors import CANCELLED, USAGE, CliError, Unreachable
from orrery_cli.options import AsJson
from orrery_cli.output import age, duration, number, print_items, print_json, print_table

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045
TextList = Optional[list[str]]  # noqa: UP045
SweepId = Annotated[int, typer.Argument(min=1, help="Id of a sweep.")]
EVERY_S = 5.0
PATIENCE_S = 900.0
EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": CANCELLED}

app = typer.Typer(help="Search parameters with many runs.", no_args_is_help=True)


@app.command("start")
def start(
    definition: Annotated[
        OptionalText,
        typer.Argument(metavar="[FILE]", help="JSON of a sweep, as examples/sweep_asha.json."),
    ] = None,
    spec: Annotated[OptionalText, typer.Option(help="JSON file with the base spec.")] = None,
    parameter: Annotated[
        TextList,
        typer.Option("--parameter", "-p", help="PATH=1,2,4 or PATH=1e-4..0.1[:log]; repeat."),
    ] = None,
    method: Annotated[OptionalText, typer.Option(help="grid, random, tpe, asha or pbt.")] = None,
    name: Annotated[OptionalText, typer.Option()] = None,
    metric: Annotated[OptionalText, typer.Option(help="Default: loss.")] = None,
    maximize: Annotated[bool, typer.Option("--maximize", help="Default: minimize.")] = False,
    runs: Annotated[OptionalInt, typer.Option(help="Runs at most.")] = None,
    device_hours: Annotated[OptionalFloat, typer.Option(help="Device-hours at most.")] = None,
    parallel: Annotated[OptionalInt, typer.Option(help="Runs at a time.")] = None,
    seed: Annotated[OptionalInt, typer.Option()] = None,
    assignments: Annotated[
        TextList, typer.Option("--set", help="Any field of the sweep: asha.min_steps=50; repeat.")
    ] = None,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="Watch it to its end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a sweep: a file, options, or both (options replace fields of the file)."""
    from orrery_cli.client import Client

    if definition is None and spec is None:
        hint = "Run orrery sweep start --spec train.json -p train.optimizer.lr=1e-4..0.1:log."
        raise CliError("nothing to start: give a file, or --spec with -p", hint, code=USAGE)
    body = spec_input.read_document(definition) if definition is not None else {}
    if spec is not None:
        body["spec"] = spec_input.split_submission(spec_input.read_document(spec))["spec"]
    for text in parameter or ():
        path, parsed = read_parameter(text)
        body.setdefault("parameters", {})[path] = parsed
    given: dict[str, Any] = {
        "method": method,
        "name": name,
        "metric.name": metric,
        "metric.goal": "maximize" if maximize else None,
        "budget.runs": runs,
        "budget.device_hours": device_hours,
        "parallel": parallel,
        "seed": seed,
    }
    for path, value in given.items():
        if value is not None:
            spec_input.put(body, path, value)
    for assignment in assignments or ():
        spec_input.set_field(body, assignment)
    body.setdefault("name", "sweep")
    with Client() as client:
        sweep = client.create("sweeps", body)
        if watching:
            raise typer.Exit(_watch(client, int(sweep["id"]), as_json))
        if as_json:
            print_json(sweep)
        else:
            print(f"sweep {sweep['id']} {sweep['name']}: {sweep['state']}")
            print(f"{client.url}/sweeps/{sweep['id']}/")


@app.command("list")
def listed(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List sweeps, newest first."""
    from orrery_cli.client import Client

    with Client() as client:
        rows = list(client.items("sweeps", most=limit))
    print_items(
        rows,
        ("id", "state", "name", "method", "runs", "owner", "age", "note"),
        lambda row: (
            row["id"],
            row["state"],
            row["name"],
            row["method"],
            row["budget"]["runs"],
            row["owner"],
            age(row["created"]),
            row["message"],
        ),
        as_json=as_json,
        empty="No sweeps. `orrery sweep start` starts one.",
        right=("id", "runs", "age"),
    )


@app.command("show")
def show(sweep: SweepId, as_json: AsJson = False) -> None:
    """Show a sweep's trials, best first, and the importance of its parameters."""
    from orrery_cli.client import Client

    with Client() as client:
        document = client.get(f"sweeps/{sweep}")
    if as_json:
        print_json(document)
        return
    print(summary(document))
    names = list(document["definition"]["parameters"])
    sign = 1 if document["metric"]["goal"] == "minimize" else -1
    trials = sorted(
        document["trials"], key=lambda t: (t["value"] is None, sign * (t["value"] or 0.0))
    )
    print_table(
        ("trial", "run", "state", document["metric"]["name"], "step", *names, "note"),
        (
            (
                trial["number"],
                trial["run"],
                trial["state"],
                number(trial["value"], 5),
                trial["step"],
                *(_text(trial["parameters"].get(name)) for name in names),
                trial["message"],
            )
            for trial in trials
        ),
        empty="No trials yet.",
        right=("trial", "run", "step", document["metric"]["name"]),
    )
    shares = document["importance"]["shares"]
    if shares:
        listing = ", ".join(f"{path} {100 * share:.0f}%" for path, share in shares.items())
        print(f"importance ({document['importance']['method']}): {listing}")


@app.command("watch")
def watch(sweep: SweepId, as_json: AsJson = False) -> None:
    """Watch a sweep to its end. Exit code: 0 finished, 1 failed, 3 cancelled."""
    from orrery_cli.client import Client

    with Client() as client:
        raise typer.Exit(_watch(client, sweep, as_json))


@app.command("cancel")
def cancel(sweep: SweepId, as_json: AsJson = False) -> None:
    """End a sweep and cancel its runs."""
    from orrery_cli.client import Client

    with Client() as client:
        document = client.post(f"sweeps/{sweep}/cancel")
    if as_json:
        print_json(document)
    else:
        print(summary(document))


def summary(document: dict[str, Any]) -> str:
    """The state of a sweep in one line: runs, best value, why it ended."""
    states = [trial["state"] for trial in document["trials"]]
    active = states.count("running")
    parts = [f"{document['used']['runs']} of {document['budget']['runs']} runs"]
    parts += [f"{active} active"] if active else []
    if (best := document["best"]) is not None:
        name = document["metric"]["name"]
        parts.append(f"best {name} {number(best['value'], 5)} by trial {best['number']}")
    head = f"sweep {document['id']} {document['name']}: {document['state']}, {', '.join(parts)}"
    return f"{head}. {document['message']}".rstrip(". ") + "."


def read_parameter(text: str) -> tuple[str, dict[str, Any]]:
    """`lr=1e-4..0.1:log` → ("lr", {min, max, scale}); `lr=1,2` → ("lr", {values}).

    Raises CliError.
    """
    path, equals, value = text.partition("=")
    if not equals or not path or not value:
        raise CliError(
            f"-p {text!r} is not a parameter",
            "Write PATH=1,2,4 or PATH=1e-4..0.1:log (also :integer, or a number of points).",
            code=USAGE,
        )
    low, dots, high = value.partition("..")
    if not dots:
        return path, {"values": [spec_input.parse_value(part) for part in value.split(",")]}
    high, *words = high.split(":")
    parameter: dict[str, Any] = {
        "min": spec_input.parse_value(low),
        "max": spec_input.parse_value(high),
    }
    for word in words:
        if word.isdecimal():
            parameter["points"] = int(word)
        elif word in ("log", "linear"):
            parameter["scale"] = word
        elif word == "integer":
            parameter["integer"] = True
        else:
            hint = "Use log, linear, integer, or a number of points."
            raise CliError(f"-p {text!r}: {word!r} is unknown", hint, code=USAGE)
    return path, parameter


def _watch(client: Any, sweep: int, as_json: bool) -> int:
    shown, outage_since = "", None
    while True:
        try:
            document = client.get(f"sweeps/{sweep}")
        except Unreachable as error:
            outage_since = outage_since or time.monotonic()
            left_s = outage_since + PATIENCE_S - time.monotonic()
            if left_s <= 0:
                raise
            if shown != error.message:
                typer.echo(f"{error.message}; trying again for {duration(left_s)}", err=True)
            shown = error.message
        else:
            outage_since = None
            line = summary(document)
            if line != shown and not as_json:
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
            shown = line
            if document["state"] in EXIT_CODES:
                if as_json:
                    print_json(document)
                return EXIT_CODES[document["state"]]
        time.sleep(EVERY_S)


def _text(value: Any) -> str:
    return number(value, 4) if isinstance(value, float) else str(value)
