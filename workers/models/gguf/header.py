"""The header of a GGUF file: its values, and where each tensor lies. Reads nothing of the tensors
and knows no torch.

The package gguf keeps an array for every string of a vocabulary, which takes seconds; this is one
scan of the mapped
file. The format: ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workers.models.errors import WeightsError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# of each kind of number: uint8, int8, uint16, int16, uint32, int32, float32, bool, uint64, int64,
# float64
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MOST_DIMS = 8
_DEEPEST = 4  # arrays within arrays; files have none


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` in torch's order, `kind` a number of gguf's GGMLQuantizationType, `start` bytes from
    the file's begin.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`values` by the file's own keys, lists for arrays."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises WeightsError for what is no whole header."""
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
        ):
            return _Scan(whole).header(path)
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist; give a .gguf file") from None
    except (ValueError, struct.error, OverflowError, MemoryError, OSError) as error:
        raise WeightsError(
            f"{path} is no whole GGUF file ({str(error)[:120]}); fetch it again"
        ) from None


class _Scan:
    """Reads one thing after another; every length is held against the file's before it is believed."""

    def __init__(self, whole: mmap.mmap) -> None:
        self._whole, self._at = whole, 0

    def header(self, path: Path) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, values = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; versions 2 and 3, little-endian, can be read")
        found: dict[str, Any] = {}
        for _ in range(values):
            key = self._text()
            if key in found:
                raise ValueError(f"{key} stands twice")
            found[key] = self._value(self._unpack("<I")[0])
        table = [self._tensor() for _ in range(tensors)]
        alignment = found.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, no power of two")
        begin = -(-self._at // alignment) * alignment
        placed = {t.name: StoredTensor(t.name, t.shape, t.kind, begin + t.start) for t in table}
        if len(placed) != len(table):
            raise ValueError("a tensor's name stands twice")
        return GgufHeader(path, found, placed)

    def _tensor(self) -> StoredTensor:
        name = self._text()
        [dims] = self._unpack("<I")
        if dims > _MOST_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        sizes = self._unpack(f"<{dims}Q")
        kind, start = self._unpack("<IQ")
        return StoredTensor(name, tuple(reversed(sizes)), kind, start)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], 1)[0]
        if kind != _ARRAY or depth > _DEEPEST:
            raise ValueError(f"a value of kind {kind}")
        of, length = self._unpack("<IQ")
        if of in _NUMBERS:
            return self._numbers(_NUMBERS[of], length)
        return [self._value(of, depth + 1) for _ in range(length)]

    def _numbers(self, kind: str, count: int) -> list[Any]:
        dtype = np.dtype(kind)
        found: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype).tolist()
        return found

    def _text(self) -> str:
        # a token that is no UTF-8 must not keep its weights from being read; surrogates give it
        # away
        return self._take(self._unpack("<Q")[0]).decode("utf-8", errors="surrogateescape")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._whole):
            raise ValueError(f"it ends at byte {len(self._whole)}, in the middle of its header")
        found = self._whole[self._at : end]
        self._at = end
        return found
