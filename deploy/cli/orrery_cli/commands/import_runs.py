"""`orrery import`: bring runs of TensorBoard, W&B or MLflow into Orrery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orrery_cli.errors import AUTHENTICATION, CliError, Refused, report
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
    """Import runs of another tracker. A second import of the same files adds what is missing.

    A run that cannot be read, or that the server refuses, does not stop the others.
    """
    from orrery_cli.client import Client
    from orrery_cli.imports.send import read_runs, send_run
    from orrery_cli.imports.source import SourceError

    answers, failed = list[dict[str, Any]](), 0
    with Client() as client:
        for run in read_runs(path, tool):
            try:
                if isinstance(run, SourceError):
                    raise run
                answer = send_run(client, run, experiment=experiment)
            except (SourceError, Refused) as error:
                if isinstance(error, Refused) and error.status == AUTHENTICATION:
                    raise  # for every run
                failed += 1
                report(error, as_json=as_json)
                continue
            answers.append(answer)
            if not as_json:
                _show(client.url, answer)
    if not answers and not failed:
        raise CliError(f"{path} has no runs", "Give a folder in which a program logged something.")
    if as_json:
        print_json(answers)
    if failed:
        runs = "1 run was" if failed == 1 else f"{failed} runs were"
        raise CliError(
            f"{runs} not imported, {len(answers)} imported", "Correct it, then repeat the import."
        )


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
