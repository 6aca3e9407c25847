"""A scratch file: bytes read ahead and written behind by two threads, through a fixed number of
buffers.

The file has no name: its space returns to the disk when the process ends, however it ends. Does not
know what it holds.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import NoReturn

import torch
from torch import Tensor

BUFFERS = 3  # one is read into while another is worked on and a third is written


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes of the file from `offset`; whole pages are reserved, so that each can be mapped."""

    offset: int
    size: int


class Disk:
    """A scratch file under `folder`. `read` and `write` return at once; OSErrors tell the folder
    and what to try.

    At most `BUFFERS` buffers, each of the largest extent so far, are alive.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            self._fail(error, "no scratch file can be made")
        # also where a run ends without `close`
        self._closed = weakref.finalize(self, os.close, self._descriptor)
        self.bytes = self.largest = 0
        self._buffers: Queue[Tensor] = Queue()
        for _ in range(BUFFERS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8))
        self._reader, self._writer = (
            ThreadPoolExecutor(1, f"scratch-{name}") for name in ("read", "write")
        )
        self._written: list[Future[None]] = []

    def claim(self, size: int) -> Extent:
        """Reserve `size` bytes now, so that a disk that is too small is told at the first step.

        Raises OSError.
        """
        extent = Extent(self.bytes, size)
        pages = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            os.posix_fallocate(self._descriptor, extent.offset, pages)
        except OSError as error:
            self._fail(error, f"{size} bytes more cannot be reserved beside {self.bytes}")
        self.bytes += pages
        self.largest = max(self.largest, size)
        return extent

    def buffer(self, size: int) -> Tensor:
        """A free buffer of at least `size` bytes; waits for a write to end where none is free."""
        free = self._buffers.get()
        if free.numel() < size:
            free = torch.empty(max(size, self.largest), dtype=torch.uint8)
        return free

    def read(self, extent: Extent) -> Future[Tensor]:
        """A buffer that begins with the extent's bytes, to be given back by `write`.

        Waits for a free one.
        """
        into = self.buffer(extent.size)
        return self._reader.submit(self._read, extent, into)

    def write(self, extent: Extent, buffer: Tensor) -> None:
        """Write the buffer's first bytes, and free it.

        What writes failed with is raised here later, or by `settle`.
        """
        self._raise_failed()
        self._written.append(self._writer.submit(self._write, extent, buffer))

    def settle(self) -> None:
        """Wait for all writes. Raises what they failed with."""
        written, self._written = self._written, []
        for each in written:
            each.result()

    def mapped(self, extent: Extent) -> Tensor:
        """The extent's bytes as a tensor over the file: pages come and go with use.

        Valid when `settle` returned.
        """
        if not extent.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(
            mmap.mmap(self._descriptor, extent.size, offset=extent.offset), dtype=torch.uint8
        )

    def close(self) -> None:
        """Give the space back; twice does no harm."""
        for threads in (self._reader, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)
        self._closed()

    def _raise_failed(self) -> None:
        done = [each for each in self._written if each.done()]
        self._written = [each for each in self._written if not each.done()]
        for each in done:
            each.result()

    def _read(self, extent: Extent, into: Tensor) -> Tensor:
        view, done = into.numpy().data[: extent.size], 0
        try:
            while done < extent.size:
                got = os.preadv(self._descriptor, [view[done:]], extent.offset + done)
                if not got:
                    raise OSError(errno.EIO, "the file ends too early")
                done += got
        except OSError as error:
            self._buffers.put(into)
            self._fail(error, f"{extent.size} bytes at {extent.offset} cannot be read")
        return into

    def _write(self, extent: Extent, buffer: Tensor) -> None:
        view, done = buffer.numpy().data[: extent.size], 0
        try:
            while done < extent.size:
                done += os.pwritev(self._descriptor, [view[done:]], extent.offset + done)
        except OSError as error:
            self._fail(error, f"{extent.size} bytes at {extent.offset} cannot be written")
        finally:
            self._buffers.put(buffer)

    def _fail(self, error: OSError, what: str) -> NoReturn:
        try:
            free = f"{shutil.disk_usage(self.folder).free} bytes are free"
        except OSError:
            free = "its free space cannot be told"
        raise OSError(
            error.errno,
            f"optimizer states on disk: {what} in {self.folder} ({error.strerror or error}; "
            f"{free}); "
            "try ORRERY_SCRATCH on another disk, or offload optimizer",
        ) from error
