"""Follows a program that cannot be changed: a TensorBoard directory, a Megatron or torchtitan log.

    python -m workers.recorder.follow --url URL --token TOKEN --name NAME --tensorboard DIR

With `--spool DIR` a follower that was killed, or stopped by SIGTERM, continues its run when it is
started again: each step arrives once. Ctrl-C finishes the run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from workers.recorder import orrery_recorder, orrery_textlogs
    from workers.recorder.orrery_sources import Item, TensorBoard, TextLog
except ImportError:  # installed alone
    import orrery_recorder  # type: ignore[no-redef]
    import orrery_textlogs  # type: ignore[no-redef]
    from orrery_sources import Item, TensorBoard, TextLog  # type: ignore[no-redef]

_JOURNAL = "follow.json"
_POSITIONS = "positions.json"  # the journal of version 0.1


class Journal:
    """What a follower read and logged, on disk, so that no step is lost or logged twice.

    Before items are logged they are stored with the numbers of lines that the run had until then. A
    follower that starts again sees from those numbers which of them were logged.
    """

    def __init__(self, run: orrery_recorder.Run) -> None:
        self._run, self._folder = run, run.spool
        self._saved: dict[str, Any] = _read(self._folder, _JOURNAL)
        if not self._saved:
            positions = _read(self._folder, _POSITIONS)
            self._saved = {"state": {"positions": positions} if positions else {}}

    @property
    def state(self) -> dict[str, Any]:
        """The state of the source that an earlier follower of this run had; empty without one."""
        return dict(self._saved.get("state") or {})

    def recover(self) -> None:
        """Log what an earlier follower had read, but not logged when it was killed."""
        items: list[Item] = self._saved.get("items") or []
        before: dict[str, int] = self._saved.get("appended") or {}
        with self._run.without_samples():
            appended = self._run.appended
            for stream in ("points", "logs"):
                own = [item for item in items if ("text" in item) == (stream == "logs")]
                logged = appended.get(stream, 0) - before.get(stream, 0)
                self._log(own[max(0, logged) :])

    def log(self, items: list[Item], state: dict[str, Any]) -> None:
        """Log items, which the source returned before it had this state."""
        if not items and state == self._saved.get("state"):
            return
        with self._run.without_samples():
            saved = {"state": state, "items": items, "appended": self._run.appended}
            if self._folder is not None:
                temporary = self._folder / f"{_JOURNAL}.new"
                temporary.write_text(json.dumps(saved))
                os.replace(temporary, self._folder / _JOURNAL)
            self._saved = {"state": state}
            self._log(items)

    def _log(self, items: list[Item]) -> None:
        for item in items:
            if "text" in item:
                self._run.line(item["text"])
            else:
                self._run.log(
                    item["values"], step=item["step"], tokens=item["tokens"], time=item["time"]
                )


def follow(
    source: TensorBoard | TextLog,
    journal: Journal,
    *,
    poll_s: float,
    idle_exit_s: float | None,
    stopped: Callable[[], bool],
) -> None:
    """Log what is new until stopped or until nothing is new for `idle_exit_s`."""
    quiet_since = time.monotonic()
    while not stopped():
        items, new = source.read()
        journal.log(items, source.state)
        if new:
            quiet_since = time.monotonic()
        elif idle_exit_s is not None and time.monotonic() - quiet_since >= idle_exit_s:
            break
        if not source.behind:
            time.sleep(poll_s)


def finish(source: TensorBoard | TextLog, journal: Journal, run: orrery_recorder.Run) -> bool:
    """Log the rest of the source and finish the run; False if lines stay in the spool."""
    more = True
    while more:
        items, new = source.read()
        journal.log(items, source.state)
        more = new or source.behind
    return run.finish()


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text()) if folder else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="follow", description="Follow a program that Orrery did not start."
    )
    parser.add_argument("--url", default=os.environ.get("ORRERY_URL"))
    parser.add_argument("--token", default=os.environ.get("ORRERY_TOKEN"))
    parser.add_argument("--name", default="", help="name of the run")
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--tensorboard", type=Path, metavar="DIR")
    sources.add_argument("--megatron-log", type=Path, metavar="FILE")
    sources.add_argument("--torchtitan-log", type=Path, metavar="FILE")
    parser.add_argument(
        "--seq-len",
        type=int,
        default=0,
        help="tokens of a sample, to count tokens in a Megatron log",
    )
    parser.add_argument("--model", help="model preset, for the run's page")
    parser.add_argument(
        "--spool",
        type=Path,
        help="store positions and unsent lines here: a follower that was stopped by SIGTERM or "
        "killed continues the run when it is started again",
    )
    parser.add_argument("--poll", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument(
        "--idle-exit",
        type=float,
        metavar="SECONDS",
        help="finish the run after this time without new data",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 if lines stay in the spool, 2 if nothing can be recorded."""
    args = _arguments(arguments)
    path: Path = args.tensorboard or args.megatron_log or args.torchtitan_log
    spec: dict[str, Any] = {"tags": ["followed"]} | ({"model": args.model} if args.model else {})
    run = orrery_recorder.init(
        args.url, args.token, args.name or path.name, spec, spool=args.spool, rank=0
    )
    if run.spool is None:
        return 2
    journal = Journal(run)
    source: TensorBoard | TextLog
    if args.tensorboard:
        source = TensorBoard(path, journal.state)
    else:
        read = orrery_textlogs.megatron if args.megatron_log else orrery_textlogs.torchtitan
        source = TextLog(path, journal.state, read, args.seq_len)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _: signals.append(signum))
    journal.recover()
    follow(
        source,
        journal,
        poll_s=args.poll,
        idle_exit_s=args.idle_exit,
        stopped=lambda: bool(signals),
    )
    if args.spool is not None and signal.SIGTERM in signals:
        return 0 if run.detach() else 1
    return 0 if finish(source, journal, run) else 1


if __name__ == "__main__":
    sys.exit(main())
