"""Finished groups of answers that no update has learned from yet, as files of a rollout rank's
node.

A killed run finds them again. Does not depend on torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from workers.posttraining.reinforcement.rollouts import Rollout


class GroupFiles:
    """One file per position of the order of prompts."""

    def __init__(self, folder: Path, *, digest: str) -> None:
        """`digest` identifies what answers depend on: options, prompts and seed."""
        self.folder, self.digest = folder, digest

    def write(self, position: int, group: Sequence[Rollout]) -> str:
        """Store a group; the text that `parse_group` reads. It appears when complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"digest": self.digest, "group": [asdict(each) for each in group]})
        path = self._path(position)
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        with open(hidden, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(path)
        return text

    def read_all(self) -> dict[int, str]:
        """The texts of all stored groups of this run's options by position; others are removed."""
        texts: dict[int, str] = {}
        for path in sorted(self.folder.glob("group-*.json")):
            text = path.read_text(encoding="ascii", errors="replace")
            try:
                known = json.loads(text)["digest"] == self.digest
            except (ValueError, TypeError, KeyError):
                known = False
            if known:
                texts[_position(path)] = text
            else:
                path.unlink(missing_ok=True)
        return texts

    def prune(self, oldest: int) -> None:
        """Remove groups of positions before `oldest`."""
        for path in self.folder.glob("group-*.json"):
            if _position(path) < oldest:
                path.unlink(missing_ok=True)

    def _path(self, position: int) -> Path:
        return self.folder / f"group-{position:010d}.json"


def parse_group(text: str) -> list[Rollout]:
    """The group of a text of `GroupFiles.write`."""
    return [Rollout(**fields) for fields in json.loads(text)["group"]]


def _position(path: Path) -> int:
    return int(path.stem.removeprefix("group-"))
