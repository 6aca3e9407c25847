"""A scratch file with asynchronous reads and writes by two threads and a fixed number of buffers.

The file is unlinked: its space is freed when the process ends for any reason. Does not depend on
its contents.
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

BUFFERS = 3  # one being read, one in use, one being written


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes of the file from `offset`; full pages are reserved, so that each can be
    mapped.
    """

    offset: int
    size: int


class Disk:
    """A scratch file in `folder`; `read` and `write` are asynchronous. OSErrors include a hint.

    At most `BUFFERS` buffers, each of the largest extent so far, exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            self._fail(error, "a scratch file cannot be created")
        # also if a run ends without `close`
        self._closed = weakref.finalize(self, os.close, self._descriptor)
        self.bytes = self.largest = 0
        self._buffers: Queue[Tensor] = Queue()
        for _ in range(BUFFERS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8))
        self._reader, self._writer = (
            ThreadPoolExecutor(1, f"scratch-{name}") for name in ("read", "write")
        )
        self._written: list[Future[None]] = []

    def reserve(self, size: int) -> Extent:
        """Reserve `size` bytes now, so that a full disk is reported at the first step. Raises
        OSError.
        """
        extent = Extent(self.bytes, size)
        pages = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            os.posix_fallocate(self._descriptor, extent.offset, pages)
        except OSError as error:
            self._fail(error, f"{size} more bytes cannot be reserved after {self.bytes}")
        self.bytes += pages
        self.largest = max(self.largest, size)
        return extent

    def buffer(self, size: int) -> Tensor:
        """A free buffer of at least `size` bytes; waits for a write if none is free."""
        free = self._buffers.get()
        if free.numel() < size:
            free = torch.empty(max(size, self.largest), dtype=torch.uint8)
        return free

    def read(self, extent: Extent) -> Future[Tensor]:
        """Read into a free buffer, which `write` frees again; waits for a free one."""
        buffer = self.buffer(extent.size)
        return self._reader.submit(self._read, extent, buffer)

    def write(self, extent: Extent, buffer: Tensor) -> None:
        """Write the buffer's first bytes and free it. A write's error is raised by a later call or
        `wait`.
        """
        self._raise_failed()
        self._written.append(self._writer.submit(self._write, extent, buffer))

    def wait(self) -> None:
        """Wait for all writes. Raises OSError if one failed."""
        written, self._written = self._written, []
        for each in written:
            each.result()

    def mapped(self, extent: Extent) -> Tensor:
        """The extent's bytes as a tensor over the file, paged in on use. Valid after `wait`."""
        if not extent.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(
            mmap.mmap(self._descriptor, extent.size, offset=extent.offset), dtype=torch.uint8
        )

    def close(self) -> None:
        """Free the space; may be called twice."""
        for threads in (self._reader, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)
        self._closed()

    def _raise_failed(self) -> None:
        done = [each for each in self._written if each.done()]
        self._written = [each for each in self._written if not each.done()]
        for each in done:
            each.result()

    def _read(self, extent: Extent, buffer: Tensor) -> Tensor:
        view, done = buffer.numpy().data[: extent.size], 0
        try:
            while done < extent.size:
                count = os.preadv(self._descriptor, [view[done:]], extent.offset + done)
                if not count:
                    raise OSError(errno.EIO, "the file is truncated")
                done += count
        except OSError as error:
            self._buffers.put(buffer)
            self._fail(error, f"{extent.size} bytes at {extent.offset} cannot be read")
        return buffer

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
            free = "its free space is unknown"
        raise OSError(
            error.errno,
            f"optimizer states on disk: {what} in {self.folder} ({error.strerror or error}; "
            f"{free}). "
            "Use ORRERY_SCRATCH on another disk, or offload optimizer.",
        ) from error
