"""What the other replicas of a run told of their requests: the lines that they wrote since this one began.

Reads the folders of ranks on this node; a line is there before its answer's last piece leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from workers.contracts.serving import RequestTold
from workers.inference.server.witness import REQUESTS


class Others:
    """`rank` is the one that asks; what the files held before is of earlier attempts."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._own = directory, f"rank-{rank}"
        self._began = {path: path.stat().st_size for path in self._files()}

    def requests(self) -> Iterator[RequestTold]:
        for path in self._files():
            with open(path, "rb") as file:
                file.seek(self._began.get(path, 0))
                for line in file:
                    try:
                        yield RequestTold.model_validate_json(line)
                    except ValidationError:
                        continue  # being written

    def _files(self) -> list[Path]:
        return [path for path in sorted(self._directory.glob(f"rank-*/{REQUESTS}")) if path.parent.name != self._own]
