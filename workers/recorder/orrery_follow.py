"""Follows a program that cannot be changed: a TensorBoard directory, or a Megatron or torchtitan
log, as it grows.

    python -m workers.recorder.follow --url URL --token TOKEN --name NAME --tensorboard DIR

Positions are kept in the spool, so a follower that is started again goes on. Reading formats is its
neighbours' part.
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

# of a tag, in lower case and with "/" between its words: Orrery's name and a factor
_TAGS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(
        ("loss", "train/loss", "loss/train", "train_loss", "training/loss", "lm loss"),
        ("loss", 1.0),
    ),
    "loss_metrics/global_avg_loss": ("loss", 1.0),
    # the Trainer's mean over the whole run, told at its last step
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
    """Scalars of all event files under a directory, gathered by step; a subdirectory's name goes
    before its tags.
    """

    def __init__(self, root: Path, positions: dict[str, int]) -> None:
        self._root, self.positions = root, positions
        self._waiting: dict[int, tuple[float, dict[str, float]]] = {}

    def poll(self, run: orrery_recorder.Run) -> bool:
        """Log what is complete; True where anything was new.

        A step is complete once a later one or nothing follows.
        """
        new = False
        for file in sorted(self._root.rglob("*tfevents*")):
            place = file.relative_to(self._root)
            at = self.positions.get(str(place), 0)
            scalars, self.positions[str(place)] = orrery_tensorboard.read_scalars(file, at)
            prefix = "" if place.parent == Path() else f"{place.parent.as_posix()}/"
            for scalar in scalars:
                name, factor = _named(prefix + scalar.tag)
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
        return not self._waiting


class TextLog:
    """Lines of one growing file; numbers become points, every line a log line.

    A file cut short is read anew.
    """

    def __init__(self, file: Path, positions: dict[str, int], read: Reader, seq_len: int) -> None:
        self._file, self.positions, self._read, self._seq_len = file, positions, read, seq_len

    settled = True

    def poll(self, run: orrery_recorder.Run) -> bool:
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


def _named(tag: str) -> tuple[str, float]:
    """Orrery's name of a tag, by the whole tag or by what follows its first directory."""
    plain = tag.lower()
    return _TAGS.get(plain) or _TAGS.get(plain.partition("/")[2]) or (tag, 1.0)


def follow(
    source: TensorBoard | TextLog,
    run: orrery_recorder.Run,
    *,
    poll_s: float,
    idle_exit_s: float | None,
    stopped: Callable[[], bool],
) -> None:
    """Poll until stopped or until nothing is new for `idle_exit_s`; positions are saved where no
    step is half read.
    """
    quiet_since = time.monotonic()
    while not stopped():
        if source.poll(run):
            quiet_since = time.monotonic()
        elif idle_exit_s is not None and time.monotonic() - quiet_since >= idle_exit_s:
            break
        if source.settled and run.spool is not None:
            _keep(run.spool, source.positions)
        time.sleep(poll_s)
    source.poll(run)


def _keep(spool: Path, positions: dict[str, int]) -> None:
    fresh = spool / "positions.new"
    fresh.write_text(json.dumps(positions))
    os.replace(fresh, spool / "positions.json")


def _kept(spool: Path | None) -> dict[str, int]:
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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tensorboard", type=Path, metavar="DIR")
    what.add_argument("--megatron-log", type=Path, metavar="FILE")
    what.add_argument("--torchtitan-log", type=Path, metavar="FILE")
    parser.add_argument(
        "--seq-len",
        type=int,
        default=0,
        help="tokens of a sample, to count tokens in a Megatron log",
    )
    parser.add_argument("--model", help="model preset, for the run's page")
    parser.add_argument(
        "--spool", type=Path, help="keep positions and unsent lines here, to go on after a restart"
    )
    parser.add_argument("--poll", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument(
        "--idle-exit",
        type=float,
        metavar="SECONDS",
        help="finish the run when nothing is new so long",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = _arguments(arguments)
    place: Path = given.tensorboard or given.megatron_log or given.torchtitan_log
    spec: dict[str, Any] = {"tags": ["followed"]} | ({"model": given.model} if given.model else {})
    run = orrery_recorder.init(
        given.url, given.token, given.name or place.name, spec, spool=given.spool, rank=0
    )
    if run.spool is None:
        return 2
    source: TensorBoard | TextLog
    if given.tensorboard:
        source = TensorBoard(place, _kept(run.spool))
    else:
        read = orrery_textlogs.megatron if given.megatron_log else orrery_textlogs.torchtitan
        source = TextLog(place, _kept(run.spool), read, given.seq_len)
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _: ended.append(signum))
    follow(source, run, poll_s=given.poll, idle_exit_s=given.idle_exit, stopped=lambda: bool(ended))
    return 0 if run.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
