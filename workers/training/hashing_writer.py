"""Writes a rank's checkpoint files and hashes them, so that no rank hashes the files of another.

The digests lie next to the files until rank 0 has collected them for the manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from workers.models.weights.manifest import file_digest

_PREFIX = ".sha256."


class HashingWriter(FileSystemWriter):
    """torch's writer of one synced file per rank, with a file of its SHA-256."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, then the digest of each file."""
        written = super().write_data(plan, planner)
        results: list[Any] = written.wait()
        for name in sorted({each.storage_data.relative_path for each in results}):
            digest = file_digest(self.folder / name)
            (self.folder / f"{_PREFIX}{name}").write_text(digest, encoding="ascii")
        return written


def take_digests(folder: Path) -> dict[str, str]:
    """The digests that the ranks wrote, by file name; removes their files."""
    digests = {}
    for path in folder.glob(f"{_PREFIX}*"):
        digests[path.name.removeprefix(_PREFIX)] = path.read_text(encoding="ascii")
        path.unlink()
    return digests
