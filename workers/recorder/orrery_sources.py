"""Sources of a follower: a TensorBoard directory, or a text log of Megatron or torchtitan.

A source returns what is new in bounded portions. Its state is JSON, so that another process
continues where this one stopped. Does not depend on the recorder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    from workers.recorder import orrery_tensorboard, orrery_textlogs
except ImportError:  # installed alone
    import orrery_tensorboard  # type: ignore[no-redef]
    import orrery_textlogs  # type: ignore[no-redef]

Reader = Callable[[str, int], "orrery_textlogs.Numbers | None"]
# a line of the log, {"text"}, or the numbers of a step, {"step", "tokens", "time", "values"}
Item = dict[str, Any]

PORTION_BYTES = 1 << 20  # of one file per read

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

    def __init__(self, root: Path, state: dict[str, Any]) -> None:
        """`state` is that of an earlier source of the same directory, or empty."""
        self._root = root
        self._positions: dict[str, int] = dict(state.get("positions") or {})
        # steps that are not complete yet: their time and values
        self._waiting: dict[int, tuple[float, dict[str, float]]] = {
            int(step): (float(stamp), dict(values))
            for step, stamp, values in state.get("waiting") or []
        }
        self.behind = False

    @property
    def state(self) -> dict[str, Any]:
        """What has been read and not been returned."""
        waiting = [[step, *content] for step, content in self._waiting.items()]
        return {"positions": dict(self._positions), "waiting": waiting}

    def read(self) -> tuple[list[Item], bool]:
        """Complete steps, and whether anything was new; sets `behind` if more can be read at once.

        A step is complete once a later one, or nothing, follows.
        """
        new = self.behind = False
        limits: list[int] = []  # steps that files may still have more of
        for file in sorted(self._root.rglob("*tfevents*")):
            relative = file.relative_to(self._root)
            at = self._positions.get(str(relative), 0)
            scalars, end, more = orrery_tensorboard.read_scalars(file, at, PORTION_BYTES)
            self._positions[str(relative)] = end
            new = new or end > at
            self.behind = self.behind or more
            prefix = "" if relative.parent == Path() else f"{relative.parent.as_posix()}/"
            for scalar in scalars:
                name, factor = metric_name(prefix + scalar.tag)
                _, values = self._waiting.setdefault(scalar.step, (scalar.time, {}))
                values[name] = scalar.value * factor
            if more:
                limits.append(scalars[-1].step if scalars else -1)
        limits.append(max(self._waiting, default=-1))
        complete = [step for step in sorted(self._waiting) if step < min(limits) or not new]
        return [self._item(step) for step in complete], new

    def _item(self, step: int) -> Item:
        stamp, values = self._waiting.pop(step)
        return {"step": step, "tokens": None, "time": stamp, "values": values}


class TextLog:
    """Lines of one growing file; numbers become points, every line a log line.

    A truncated file is read from its start.
    """

    def __init__(self, file: Path, state: dict[str, Any], read: Reader, seq_len: int) -> None:
        """`state` is that of an earlier source of the same file, or empty."""
        self._file, self._read, self._seq_len = file, read, seq_len
        self._positions: dict[str, int] = dict(state.get("positions") or {})
        self.behind = False

    @property
    def state(self) -> dict[str, Any]:
        """How far the file has been read."""
        return {"positions": dict(self._positions)}

    def read(self) -> tuple[list[Item], bool]:
        """New lines with their numbers, and whether there were any."""
        items: list[Item] = []
        for line in self._lines():
            items.append({"text": line})
            numbers = self._read(line, self._seq_len)
            if numbers:
                items.append(
                    {
                        "step": numbers.step,
                        "tokens": numbers.tokens,
                        "time": numbers.time,
                        "values": numbers.values,
                    }
                )
        return items, bool(items)

    def _lines(self) -> list[str]:
        self.behind = False
        if not self._file.exists():
            return []
        at = self._positions.get(self._file.name, 0)
        with open(self._file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < at:
                at = 0
            stream.seek(at)
            data = stream.read(PORTION_BYTES)
            if b"\n" not in data:
                data += stream.readline()
        data = data[: data.rfind(b"\n") + 1]
        self._positions[self._file.name] = at + len(data)
        self.behind = bool(data) and at + len(data) < size
        return [line.decode("utf-8", "replace").rstrip() for line in data.split(b"\n")[:-1]]


def metric_name(tag: str) -> tuple[str, float]:
    """Orrery's name of a tag, by the full tag or by the part after its first directory."""
    key = tag.lower()
    return _TAGS.get(key) or _TAGS.get(key.partition("/")[2]) or (tag, 1.0)
