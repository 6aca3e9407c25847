"""The progress of a produce run as points: lines, candidates by filter, tokens, cost.

At most one point per second, and one at the end. Totals include earlier attempts: they are kept in
a file next to the output. Does not depend on files' content.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from workers.contracts.base import WireContract
from workers.metrics.recorder import Recorder
from workers.posttraining.produce.client import ChatClient
from workers.posttraining.produce.filters import Verdict
from workers.runtime.exit_codes import write_atomically

_EVERY_S = 1.0


class Counts(Protocol):
    """What the output files hold."""

    accepted: int
    rejected: int
    done: set[int]


class Totals(WireContract):
    """Numbers of all attempts that the output files do not show."""

    candidates: int = 0
    filtered: dict[str, int] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None


class Progress:
    """Counts candidates and writes points."""

    def __init__(self, recorder: Recorder, clients: Sequence[ChatClient]) -> None:
        self.recorder, self.clients = recorder, list(clients)
        self.candidates = 0
        self.filtered: dict[str, int] = {}
        self._before, self._path = Totals(), Path()
        self._started = self._written = time.monotonic()
        self._done_before = 0

    def restore(self, files: Counts, output: Path) -> None:
        """Continue from the totals of earlier attempts."""
        self._done_before = len(files.done)
        self._path = output.with_name(f".{output.name}.totals")
        try:
            self._before = Totals.from_dict(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return
        self.candidates, self.filtered = self._before.candidates, dict(self._before.filtered)

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Count the candidates of a unit: several for best_of_n."""
        self.candidates += len(verdicts)
        for verdict in verdicts:
            if verdict.rejected_by is not None:
                name = verdict.rejected_by
                self.filtered[name] = self.filtered.get(name, 0) + 1

    def step(self, files: Counts) -> None:
        """Write a point if the last one is old enough."""
        if time.monotonic() - self._written >= _EVERY_S:
            self.write(files)

    def write(self, files: Counts) -> None:
        """Write a point and the totals."""
        self._written = time.monotonic()
        seconds = max(1e-3, self._written - self._started)
        totals = self._totals()
        new = totals.completion_tokens - self._before.completion_tokens
        values = {
            "produce/accepted": float(files.accepted),
            "produce/rejected": float(files.rejected),
            "produce/candidates": float(totals.candidates),
            **{f"produce/filtered/{name}": float(n) for name, n in totals.filtered.items()},
            "produce/prompt_tokens": float(totals.prompt_tokens),
            "produce/completion_tokens": float(totals.completion_tokens),
            "produce/tokens_per_s": new / seconds,
            "produce/lines_per_s": (len(files.done) - self._done_before) / seconds,
        }
        if totals.cost_usd is not None:
            values["produce/cost_usd"] = totals.cost_usd
        tokens = totals.prompt_tokens + totals.completion_tokens
        self.recorder.point(step=len(files.done), tokens=tokens, values=values)
        write_atomically(self._path, totals.to_json())

    def _totals(self) -> Totals:
        before, costs = self._before, [client.cost_usd for client in self.clients]
        known = [cost for cost in (*costs, before.cost_usd) if cost is not None]
        return Totals(
            candidates=self.candidates,
            filtered=self.filtered,
            prompt_tokens=before.prompt_tokens + sum(each.prompt_tokens for each in self.clients),
            completion_tokens=before.completion_tokens
            + sum(each.completion_tokens for each in self.clients),
            cost_usd=sum(known) if known else None,
        )
