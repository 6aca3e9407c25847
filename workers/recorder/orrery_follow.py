"""Follows a program that cannot be changed: a TensorBoard directory, a Megatron or torchtitan log.

    python -m workers.recorder.follow --url URL --token TOKEN --name NAME --tensorboard DIR

Positions are stored in the spool, so a restarted follower continues.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    from workers.recorder import orrery_recorder, orrery_tensorboard, orrery_textlogs
except ImportError:  # installed alone
    import orrery_recorder  # type: ignore[no-redef]
    import orrery_tensorboard  # type: ignore[no-redef]
    import orrery_textlogs  # type: ignore[no-redef]

Reader = Callable[[str, int], "orrery_textlogs.Numbers | None"]

# tag in lower case → Orrery's name and a factor
_TAGS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(
        ("loss", "train/loss", "loss/train", "train_loss", "training/loss", "lm loss"),
        ("loss", 1.0),
    ),
    "loss_metrics/global_avg_loss": ("loss", 1.0),
    # the Trainer's mean over the full run, logged at its last step
    "train/train_loss": ("train/train_loss", 1.0),
    **dict.fromkeys(
        ("eval/loss", "val/loss", "loss/val", "validation/loss", "eval_loss"), ("val_loss", 1.0)
    ),
    **dict.fromkeys(("lm loss validation", "validation_metrics/loss"), ("val_loss", 1.0)),
    **dict.fromkeys(
        ("lr", "learning-rate", "learning_rate", "train/learning_rate", "train/lr"), ("lr", 1.0)
    ),
    **dict.fromkeys(("grad-norm", "grad_norm", "train/grad_norm"), ("grad_norm", 1.0)),
    **dict.fromkeys(("loss-scale", "loss_scale"), ("loss_scale", 1.0)),
    "throughput(tps)": ("tokens_per_s_per_device", 1.0),
    "tflops": ("tflops_per_device", 1.0),
    "mfu(%)": ("mfu", 0.01),
    "time_metrics/end_to_end(s)": ("step_time_s", 1.0),
    "iteration-time": ("step_time_s", 1.0),
    "time_metrics/data_loading(s)": ("data_time_s", 1.0),
}


class TensorBoard:
    """Scalars of all event files under a directory, grouped by step; tags get the subdirectory's
    name as a prefix.
    """

    def __init__(self, root: Path, positions: dict[str, int]) -> None:
        self._root, self.positions = root, positions
        self._waiting: dict[int, tuple[float, dict[str, float]]] = {}

    def poll(self, run: orrery_recorder.Run) -> bool:
        """Log complete steps; whether anything was new.

        A step is complete once a later one, or nothing, follows.
        """
        new = False
        for file in sorted(self._root.rglob("*tfevents*")):
            relative = file.relative_to(self._root)
            at = self.positions.get(str(relative), 0)
            scalars, self.positions[str(relative)] = orrery_tensorboard.read_scalars(file, at)
            prefix = "" if relative.parent == Path() else f"{relative.parent.as_posix()}/"
            for scalar in scalars:
                name, factor = _metric_name(prefix + scalar.tag)
                _, values = self._waiting.setdefault(scalar.step, (scalar.time, {}))
                values[name] = scalar.value * factor
                new = True
        newest = max(self._waiting, default=-1)
        for step in sorted(self._waiting):
            if step < newest or not new:
                stamp, values = self._waiting.pop(step)
                run.log(values, step=step, time=stamp)
        return new

    @property
    def settled(self) -> bool:
        """Whether no step is partly read."""
        return not self._waiting


class TextLog:
    """Lines of one growing file; numbers become points, every line a log line.

    A truncated file is read from its start.
    """

    def __init__(self, file: Path, positions: dict[str, int], read: Reader, seq_len: int) -> None:
        self._file, self.positions, self._read, self._seq_len = file, positions, read, seq_len

    settled = True

    def poll(self, run: orrery_recorder.Run) -> bool:
        """Log new lines; whether there were any."""
        new = False
        for line in self._lines():
            new = True
            run.line(line)
            numbers = self._read(line, self._seq_len)
            if numbers:
                run.log(numbers.values, step=numbers.step, tokens=numbers.tokens, time=numbers.time)
        return new

    def _lines(self) -> Iterator[str]:
        if not self._file.exists():
            return
        at = self.positions.get(self._file.name, 0)
        with open(self._file, "rb") as stream:
            if os.fstat(stream.fileno()).st_size < at:
                at = 0
            stream.seek(at)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                at += len(line)
                yield line.decode("utf-8", "replace").rstrip()
        self.positions[self._file.name] = at


def _metric_name(tag: str) -> tuple[str, float]:
    """Orrery's name of a tag, by the full tag or by the part after its first directory."""
    key = tag.lower()
    return _TAGS.get(key) or _TAGS.get(key.partition("/")[2]) or (tag, 1.0)


def follow(
    source: TensorBoard | TextLog,
    run: orrery_recorder.Run,
    *,
    poll_s: float,
    idle_exit_s: float | None,
    stopped: Callable[[], bool],
) -> None:
    """Poll until stopped or until nothing is new for `idle_exit_s`; saves positions when no step is
    partly read.
    """
    quiet_since = time.monotonic()
    while not stopped():
        if source.poll(run):
            quiet_since = time.monotonic()
        elif idle_exit_s is not None and time.monotonic() - quiet_since >= idle_exit_s:
            break
        if source.settled and run.spool is not None:
            _save_positions(run.spool, source.positions)
        time.sleep(poll_s)
    source.poll(run)


def _save_positions(spool: Path, positions: dict[str, int]) -> None:
    temporary = spool / "positions.new"
    temporary.write_text(json.dumps(positions))
    os.replace(temporary, spool / "positions.json")


def _load_positions(spool: Path | None) -> dict[str, int]:
    try:
        return dict(json.loads((spool / "positions.json").read_text())) if spool else {}
    except (OSError, ValueError):
        return {}


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
        help="store positions and unsent lines here, to continue after a restart",
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
    source: TensorBoard | TextLog
    positions = _load_positions(run.spool)
    if args.tensorboard:
        source = TensorBoard(path, positions)
    else:
        read = orrery_textlogs.megatron if args.megatron_log else orrery_textlogs.torchtitan
        source = TextLog(path, positions, read, args.seq_len)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _: signals.append(signum))
    follow(source, run, poll_s=args.poll, idle_exit_s=args.idle_exit, stopped=lambda: bool(signals))
    return 0 if run.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
