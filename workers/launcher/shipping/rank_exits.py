"""Reads how the ranks of a run directory exited: their status, exit file and last lines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from workers.launcher.exits.classification import RankExit
from workers.launcher.rundir import RunDir, open_to_read, read_json
from workers.launcher.shipping.log_capture import LogCollector

_READ_S = 0.5  # per rank, to read what is left of its output


def read_rank_exits(
    run_dir: RunDir, ranks: range, collectors: Mapping[int, LogCollector]
) -> list[RankExit]:
    """How each local rank exited, without ranks that torchrun never started.

    `collectors` have the last lines of ranks whose logs are shipped.
    """
    exits = []
    for rank in ranks:
        folder = run_dir.rank(rank)
        status = read_json(folder / "status.json")
        if not status and not (folder / "process.json").exists():
            continue
        collector = collectors.get(rank)
        if collector is not None:
            with contextlib.suppress(OSError):
                collector.collect(final=True, seconds=_READ_S)
        record = read_json(folder / "exit.json")
        if collector is None or collector.behind:
            lines = tail(folder / "stderr.log")
        else:
            lines = list(collector.last_lines)
        at = float(status.get("time", time.time()))
        exits.append(RankExit(rank, status.get("code"), at, record, lines))
    return exits


def tail(path: Any) -> list[str]:
    """The last lines of a file, at most 16 KiB; empty if it cannot be read."""
    try:
        with open_to_read(path) as file:
            file.seek(max(0, os.stat(path).st_size - 16384))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
