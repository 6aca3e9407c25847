"""`orrery submit`: submit a spec file, or a run that options describe."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from orrery_cli import spec_input
from orrery_cli.errors import USAGE, CliError
from orrery_cli.options import AsJson
from orrery_cli.output import print_json

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)
OptionalInt = Optional[int]  # noqa: UP045
TextList = Optional[list[str]]  # noqa: UP045

# option -> field of the spec
FIELDS = {
    "kind": "kind",
    "model": "model",
    "steps": "train.steps",
    "seq_len": "train.seq_len",
    "devices": "resources.devices",
    "min_devices": "resources.min_devices",
    "pool": "resources.pool",
    "priority": "priority",
}


def submit(
    spec_file: Annotated[
        OptionalText, typer.Argument(metavar="[SPEC]", help="JSON file with a spec; `-`: stdin.")
    ] = None,
    name: Annotated[OptionalText, typer.Option(help="Default: kind and model.")] = None,
    experiment: Annotated[
        OptionalText, typer.Option(help="Name; a new one creates the experiment.")
    ] = None,
    kind: Annotated[OptionalText, typer.Option(help="train, serve, generate, …")] = None,
    model: Annotated[OptionalText, typer.Option(help="A preset, such as llama-tiny.")] = None,
    steps: Annotated[OptionalInt, typer.Option(help="Steps of training.")] = None,
    seq_len: Annotated[OptionalInt, typer.Option(help="Tokens per sequence.")] = None,
    devices: Annotated[OptionalInt, typer.Option(help="Devices of the run.")] = None,
    min_devices: Annotated[
        OptionalInt, typer.Option(help="It may train on fewer devices, at least these.")
    ] = None,
    plan: Annotated[
        OptionalText, typer.Option(help="`auto`, or fields as dp=2,zero=1,precision=bf16.")
    ] = None,
    pool: Annotated[OptionalText, typer.Option(help="The pool to run in.")] = None,
    priority: Annotated[OptionalInt, typer.Option(help="Higher starts earlier.")] = None,
    tag: Annotated[TextList, typer.Option(help="A tag; repeat for more.")] = None,
    notes: Annotated[OptionalText, typer.Option(help="Notes of the run.")] = None,
    assignments: Annotated[
        TextList, typer.Option("--set", help="Any field: train.optimizer.lr=0.001; repeat.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if the plan is predicted not to fit.")
    ] = False,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="Watch it to its end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a run: a spec file, options, or both (options replace fields of the file)."""
    from orrery_cli.client import Client

    given: dict[str, Any] = {
        "kind": kind,
        "model": model,
        "steps": steps,
        "seq_len": seq_len,
        "devices": devices,
        "min_devices": min_devices,
        "pool": pool,
        "priority": priority,
    }
    changes = {FIELDS[option]: value for option, value in given.items() if value is not None}
    if spec_file is None and not (changes or plan or assignments):
        raise CliError(
            "nothing to submit",
            "Give a spec file or options: orrery submit --model llama-tiny --steps 20 --devices 2.",
            code=USAGE,
        )
    document = spec_input.read_document(spec_file) if spec_file is not None else {"spec": {}}
    body = spec_input.split_submission(document)
    spec = body["spec"]
    for path, value in changes.items():
        spec_input.put(spec, path, value)
    if plan is not None:
        _set_plan(spec, plan)
    for assignment in assignments or ():
        spec_input.set_field(spec, assignment)
    if tag:
        spec["tags"] = [*spec.get("tags", ()), *tag]
    if notes is not None:
        spec["notes"] = notes
    if spec_file is None:
        spec_input.training_defaults(spec)
    body |= {"name": name} if name is not None else {}
    body |= {"experiment": experiment} if experiment is not None else {}
    body |= {"force": True} if force else {}

    with Client() as client:
        run = client.create("runs", body)
        if not watching:
            if as_json:
                print_json(run)
            else:
                print(f"run {run['id']} {run['name']}: {run['state']}")
                print(f"{client.url}/runs/{run['id']}/")
            return
        from orrery_cli.watching import watch_run

        if not as_json:
            print(f"run {run['id']} {run['name']}: {client.url}/runs/{run['id']}/", flush=True)
        raise typer.Exit(watch_run(client, int(run["id"]), as_json=as_json))


def _set_plan(spec: dict[str, Any], text: str) -> None:
    if text == "auto":
        spec["plan"] = "auto"
        return
    for part in text.split(","):
        spec_input.set_field(spec, f"plan.{part.strip()}")
