"""The output files: accepted lines, and the rejected ones with reasons. Both are the progress.

A line names its unit of work, so a restarted run repeats and loses none. Does not depend on what
else is in a line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.metrics.line_files import open_for_append
from workers.runtime.exit_codes import UserError


class OutputFiles:
    """Counts of both files, `reasons` of the rejected lines, and the units that are `done`."""

    def __init__(
        self, path: Path, *, fingerprint: str, existing: Callable[[dict[str, Any]], None]
    ) -> None:
        """`existing` gets each accepted line that an earlier attempt wrote.

        Raises UserError for a path that cannot be written or holds another spec's lines.
        """
        self.path = path
        self.rejected_path = path.with_name(f"{path.stem}.rejected{path.suffix}")
        self.accepted = self.rejected = 0
        self.reasons: Counter[str] = Counter()
        self.done: set[int] = set()
        mark = path.with_name(f".{path.name}.made-by")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made_by = mark.read_text(encoding="utf-8") if mark.is_file() else None
            if made_by is None and path.is_file() and path.stat().st_size:
                raise UserError(f"produce.output: {path} exists. Use another name.")
            if made_by not in (None, fingerprint):
                raise UserError(
                    f"produce.output: {path} holds lines of another spec. Use another name."
                )
            mark.write_text(fingerprint, encoding="utf-8")
            self._files = [open_for_append(each) for each in (path, self.rejected_path)]
            for each, accepted in ((path, True), (self.rejected_path, False)):
                self._read(each, accepted, existing)
        except OSError as error:
            raise UserError(
                f"produce.output: {path} cannot be written: {error.strerror}. Use a writable path."
            ) from None

    def write(self, line: dict[str, Any], *, accepted: bool) -> None:
        """Append a line in one write; `provenance.unit` is its unit."""
        self._count(line, accepted)
        ready = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        file = self._files[0 if accepted else 1]
        while ready:
            ready = ready[os.write(file, ready) :]

    def close(self) -> None:
        """Sync and close the files."""
        for file in self._files:
            os.fsync(file)
            os.close(file)

    def _read(self, path: Path, accepted: bool, existing: Callable[[dict[str, Any]], None]) -> None:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    self._count(line, accepted)
                    if accepted:
                        existing(line)
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"produce.output: {path}: line {number} is not of this run. Use another "
                        "name."
                    ) from None

    def _count(self, line: dict[str, Any], accepted: bool) -> None:
        self.done.add(int(line["provenance"]["unit"]))
        if accepted:
            self.accepted += 1
            return
        self.rejected += 1
        self.reasons[str(line["provenance"]["rejected_by"])] += 1
