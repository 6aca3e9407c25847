"""`orrery import`: bring runs of TensorBoard, W&B or MLflow into Orrery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orrery_cli.errors import CliError
from orrery_cli.options import AsJson
from orrery_cli.output import print_json


def import_runs(
    path: Annotated[
        Path,
        typer.Argument(help="TensorBoard folder or event file, W&B offline folder, or mlruns."),
    ],
    tool: Annotated[
        str, typer.Option("--format", help="tensorboard, wandb or mlflow; default: by the files.")
    ] = "",
    experiment: Annotated[
        str, typer.Option(help="Experiment of the runs; default: the tool's project.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Import runs of another tracker. A second import of the same files adds what is missing."""
    from orrery_cli.client import Client
    from orrery_cli.imports.send import read_runs, send_run

    answers = []
    with Client() as client:
        for run in read_runs(path, tool):
            answer = send_run(client, run, experiment=experiment)
            answers.append(answer)
            if not as_json:
                _show(client.url, answer)
    if not answers:
        raise CliError(f"{path} has no runs", "give a folder in which a program logged something")
    if as_json:
        print_json(answers)


def _show(url: str, answer: dict[str, object]) -> None:
    what = "new run" if answer["new"] else "run"
    numbers = f"{answer['points']} points, {answer['lines']} lines, {answer['media']} media"
    print(f"{what} {answer['id']} {answer['name']}: {numbers} added, {answer['known']} known")
    print(f"  {url}/runs/{answer['id']}/")
    rejected, skipped = answer["rejected"], answer["skipped"]
    if isinstance(rejected, list) and rejected:
        print(f"  {len(rejected)} rejected, the first: {rejected[0]}")
    if isinstance(skipped, dict):
        for kind, count in skipped.items():
            print(f"  left out: {count} {kind}")
