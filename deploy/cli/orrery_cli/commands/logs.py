"""`orrery logs`: the output of a run's ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from orrery_cli.errors import Unreachable
from orrery_cli.options import AsJson, RunId
from orrery_cli.output import print_json_line

if TYPE_CHECKING:
    from orrery_cli.client import Client

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)
OptionalInt = Optional[int]  # noqa: UP045
EVERY_S = 1.0
PATIENCE_S = 900.0
_ENDED = ("finished", "failed", "cancelled")


def logs(
    run: RunId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    rank: Annotated[OptionalInt, typer.Option(min=-1, help="-1: the supervisor.")] = None,
    query: Annotated[
        OptionalText, typer.Option("--query", "-q", help="Only lines with this text.")
    ] = None,
    tail: Annotated[
        OptionalInt, typer.Option("--tail", "-n", min=0, help="Only so many of the last lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of all ranks; with --json one JSON document per line."""
    from orrery_cli.client import Client

    with Client() as client:
        reader = _Lines(client, run, rank, query)
        batch: Any = reader.new()
        for line in batch if tail is None else deque(batch, maxlen=tail):
            _show(line, as_json)
        while follow:
            ended = reader.patiently(lambda: client.get(f"runs/{run}")["state"]) in _ENDED
            for line in reader.patiently(lambda: list(reader.new())):
                _show(line, as_json)
            if ended:  # read after the end: nothing is missing
                return
            time.sleep(EVERY_S)


class _Lines:
    """Reads the lines after the last one read."""

    def __init__(self, client: Client, run: int, rank: int | None, query: str | None) -> None:
        self.client, self.path = client, f"runs/{run}/logs"
        self.filters = {"rank": rank, "q": query}
        self.after: str | None = None

    def new(self) -> Iterator[dict[str, Any]]:
        """The new lines, in order of arrival."""
        while True:
            page = self.client.get(self.path, limit=200, after=self.after, **self.filters)
            for line in page["items"]:
                self.after = line["cursor"]
                yield line
            if page["next_cursor"] is None:
                return

    def patiently(self, request: Any) -> Any:
        """The result of a request that is repeated while the server does not answer."""
        until, warned = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return request()
            except Unreachable as error:
                if time.monotonic() > until:
                    raise
                if not warned:
                    typer.echo(f"{error.message}; trying again", err=True)
                warned = True
                time.sleep(min(15.0, max(2.0, error.after_s or 0.0)))


def _show(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line(line)
        return
    writer = "supervisor" if line["rank"] == -1 else f"rank {line['rank']}"
    print(f"{writer}: {line['text']}", flush=True)
