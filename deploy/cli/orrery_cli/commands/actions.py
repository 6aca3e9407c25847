"""`orrery cancel`, `pause`, `resume` and `retry`: act on runs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from orrery_cli.options import AsJson, RunIds
from orrery_cli.output import print_json


def cancel(ids: RunIds, as_json: AsJson = False) -> None:
    """End runs. A waiting run ends at once, a running one stops first."""
    _act("cancel", ids, as_json)


def pause(ids: RunIds, as_json: AsJson = False) -> None:
    """Save a checkpoint, release the devices, and wait until resumed."""
    _act("pause", ids, as_json)


def resume(ids: RunIds, as_json: AsJson = False) -> None:
    """Queue paused runs; they continue from their newest checkpoints."""
    _act("resume", ids, as_json)


def retry(
    ids: RunIds,
    step: Annotated[
        Optional[int],  # noqa: UP045  (Python 3.10 with older releases of typer)
        typer.Option(min=0, help="Rewind to the checkpoint of this step."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Queue ended runs for another attempt."""
    _act("retry", ids, as_json, {} if step is None else {"step": step})


def _act(action: str, ids: list[int], as_json: bool, body: dict[str, int] | None = None) -> None:
    from orrery_cli.client import Client

    with Client() as client:
        answers = [client.post(f"runs/{run}/{action}", body) for run in ids]
    if as_json:
        print_json(answers[0] if len(answers) == 1 else {"items": answers})
        return
    for answer in answers:
        print(f"run {answer['id']} {answer['name']}: {answer['state']}")
