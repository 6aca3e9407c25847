"""`rollouts.jsonl` of rank 0: the answers that this attempt learned from, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from workers.posttraining.reinforcement.rollouts import Rollout

NAME = "rollouts.jsonl"
LIMIT = 1 << 30  # bytes


class RolloutLog:
    """Appends complete iterations; above `limit` bytes the oldest ones make room.

    Then the first line is `{"gap": {"answers", "first_step", "last_step"}}`: what is missing.
    """

    def __init__(self, folder: Path, *, limit: int = LIMIT) -> None:
        self.path, self.limit = folder / NAME, limit
        self.last_step = _last_step(self.path)

    def append(self, rollouts: Sequence[Rollout]) -> None:
        """Write an iteration's answers in one go."""
        text = "".join(each.to_log_line() + "\n" for each in rollouts)
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size and size + len(text) > self.limit:
            _remove_oldest(self.path, self.limit // 2)
        with open(self.path, "a", encoding="ascii") as file:
            file.write(text)
        self.last_step = rollouts[-1].step


def _remove_oldest(path: Path, room: int) -> None:
    """Keep the newest iterations of at most `room` bytes, after a line that counts the others."""
    gap: dict[str, int] = {}
    start = path.stat().st_size - room
    position = 0
    hidden = path.with_name(f".{path.name}")
    with open(path, "rb") as file, open(hidden, "wb") as shorter:
        step = -1
        for line in file:
            try:
                fields = json.loads(line)
            except ValueError:  # of a killed attempt
                fields = {}
            if "gap" in fields:
                gap = dict(fields["gap"])
            elif position < start or (fields.get("step", step) == step and not shorter.tell()):
                step = int(fields.get("step", step))
                gap["answers"] = gap.get("answers", 0) + 1
                gap.setdefault("first_step", step)
                gap["last_step"] = step
            else:
                if not shorter.tell():
                    shorter.write(json.dumps({"gap": gap}).encode() + b"\n")
                shorter.write(line)
            position += len(line)
        if not shorter.tell():
            shorter.write(json.dumps({"gap": gap}).encode() + b"\n")
    hidden.replace(path)


def _last_step(path: Path) -> int:
    """The step of the last complete line; -1 without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return -1
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
