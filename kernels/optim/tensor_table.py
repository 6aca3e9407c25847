"""Many tensors for one launch: tables of their addresses and sizes, and the assignment of chunks to
programs.

Tensors that differ in dtype or alignment need separate launches: one table each. Tables are cached
while no tensor moves. Does not depend on any operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import runtime

CHUNK = 16384
"""Elements of a program's chunk."""

Row = tuple[torch.Tensor, ...]
# a CUDA graph reads its tables and their sources again in each replay, so these stay allocated
_captured: list[torch.Tensor] = []


@dataclass(frozen=True)
class Table:
    """Rows of tensors (parameter, gradient, …) of equal size.

    addresses [kinds, rows] and sizes [rows] int64; chunk_tensor and chunk_place [chunks] int32: a
    chunk's row and its index within the row. aligned: every address is a multiple of 16 bytes.
    """

    dtypes: tuple[torch.dtype, ...]
    aligned: bool
    rows: list[Row]
    addresses: torch.Tensor
    sizes: torch.Tensor
    chunk_tensor: torch.Tensor
    chunk_place: torch.Tensor

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.chunk_tensor.numel()


def tables(rows: Sequence[Row], chunk: int = CHUNK) -> list[Table]:
    """Tables of rows of contiguous tensors on one device. Empty tensors have a row and no chunk."""
    groups: dict[tuple[tuple[torch.dtype, ...], bool], list[Row]] = {}
    for row in rows:
        aligned = all(t.data_ptr() % 16 == 0 for t in row if t.dim())
        groups.setdefault((tuple(t.dtype for t in row), aligned), []).append(row)
    return [
        _table(dtypes, aligned, members, chunk) for (dtypes, aligned), members in groups.items()
    ]


def to_device(
    values: tuple[int | float, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The numbers as a tensor on the device, sent once while they stay the same; never
    synchronizes.
    """
    # copies of a capture run at replays only: calls outside must not find them in a cache
    make = _to_device.__wrapped__ if runtime.is_capturing(device) else _to_device
    return _keep_if_captured(make(values, shape, dtype, device))


def _table(dtypes: tuple[torch.dtype, ...], aligned: bool, rows: list[Row], chunk: int) -> Table:
    device = rows[0][0].device
    addresses = tuple(row[kind].data_ptr() for kind in range(len(dtypes)) for row in rows)
    make = _chunks.__wrapped__ if runtime.is_capturing(device) else _chunks
    chunks = make(tuple(row[0].numel() for row in rows), chunk, device)
    table = to_device(addresses, (len(dtypes), len(rows)), torch.int64, device)
    numbers, owners, chunk_numbers = (_keep_if_captured(t) for t in chunks)
    return Table(dtypes, aligned, rows, table, numbers, owners, chunk_numbers)


@functools.lru_cache(maxsize=64)
def _to_device(
    values: tuple[int | float, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return _send(torch.tensor(values, dtype=dtype).view(shape), device)


@functools.lru_cache(maxsize=16)
def _chunks(
    sizes: tuple[int, ...], chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sizes, row of each chunk, index of each chunk within its row)."""
    counts = torch.tensor([-(-n // chunk) for n in sizes])
    owners = torch.repeat_interleave(counts)
    chunk_numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    return (
        _send(torch.tensor(sizes), device),
        _send(owners.int(), device),
        _send(chunk_numbers.int(), device),
    )


def _send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return x.to(device)
    # each replay of a captured copy reads its source again
    return _keep_if_captured(x.pin_memory(), device).to(device, non_blocking=True)


def _keep_if_captured(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    if runtime.is_capturing(x.device if device is None else device):
        _captured.append(x)
    return x
