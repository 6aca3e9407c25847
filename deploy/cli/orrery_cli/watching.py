"""Follows a run to its end: reads its state and loss, waits out outages, returns the exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from orrery_cli.errors import AUTHENTICATION, CANCELLED, CliError, Refused, Unreachable
from orrery_cli.output import print_json
from orrery_cli.progress import Lines, Screen

if TYPE_CHECKING:
    from orrery_cli.client import Client

T = TypeVar("T")
INTERVAL_S = 1.0
PATIENCE_S = 900.0
LONGEST_PAUSE_S = 15.0
SERIES_EVERY_S = 3.0
EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": CANCELLED}


def watch_run(
    client: Client,
    run: int,
    *,
    interval_s: float = INTERVAL_S,
    patience_s: float = PATIENCE_S,
    as_json: bool = False,
) -> int:
    """Show a run's progress until it ends; the exit code of `watch`.

    With `as_json`, prints the ended run as one JSON document and nothing else. Raises CliError for
    a run that does not exist, for an outage longer than `patience_s`, and for a token that has
    become invalid.
    """
    display = Screen() if sys.stdout.isatty() and not as_json else Lines(silent=as_json)
    reader = _Reader(client, run, display, patience_s)
    with display:
        shown_series, losses = -SERIES_EVERY_S, []
        while True:
            document = reader.read(lambda: client.get(f"runs/{run}"))
            ended = document["state"] in EXIT_CODES
            if ended or (
                document["state"] in ("running", "stopping")
                and display.draws_losses
                and time.monotonic() - shown_series >= SERIES_EVERY_S
            ):
                answer = reader.read(
                    lambda: client.get(f"runs/{run}/series", name="loss", points=64)
                )
                losses, shown_series = answer["y"], time.monotonic()
            may_start = reader.may_start() if document["state"] == "queued" else None
            display.update(document, losses, may_start)
            if ended:
                break
            time.sleep(interval_s)
        display.ended(document, losses)
    if as_json:
        print_json(document)
    return EXIT_CODES[document["state"]]


class _Reader:
    """Repeats requests while the server does not answer."""

    def __init__(
        self, client: Client, run: int, display: Screen | Lines, patience_s: float
    ) -> None:
        self.client, self.run, self.display = client, run, display
        self.patience_s = patience_s
        self._start: tuple[float, str | None] = (-1e9, None)

    def read(self, request: Callable[[], T]) -> T:
        """The response; repeats the request for `patience_s` in an outage. Raises CliError."""
        since, pause_s = None, 1.0
        while True:
            try:
                answer = request()
            except Unreachable as error:
                now = time.monotonic()
                since = now if since is None else since
                left_s = since + self.patience_s - now
                if left_s <= 0:
                    raise CliError(
                        f"stopped watching run {self.run} after {self.patience_s:g} s: "
                        f"{error.message}",
                        f"Run `orrery watch {self.run}` to watch it later; the run continues.",
                    ) from None
                wait_s = max(pause_s, error.after_s or 0.0)
                wait_s = max(0.05, min(wait_s, LONGEST_PAUSE_S, left_s))
                self.display.outage(error.message, left_s)
                time.sleep(wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except Refused as error:
                if error.status != AUTHENTICATION:
                    raise
                raise self._without_token(error) from None
            else:
                if since is not None:
                    self.display.outage_ended()
                return answer

    def may_start(self) -> str | None:
        """The estimated start of the waiting run, at most every 5 seconds."""
        if time.monotonic() - self._start[0] > 5:
            items = self.read(lambda: self.client.get("queue", limit=200))["items"]
            mine = [item["may_start"] for item in items if item["run"] == str(self.run)]
            self._start = (time.monotonic(), mine[0] if mine else None)
        return self._start[1]

    def _without_token(self, error: Refused) -> CliError:
        return CliError(
            f"stopped watching run {self.run}: {error.message}",
            f"Log in again with `orrery login`, then run `orrery watch {self.run}`; the run "
            "continues.",
        )
