"""The header of a GGUF file: its values and the position of each tensor.

The package gguf makes an array for every string of a vocabulary, which takes seconds; this is one
scan of the mapped file. Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. Does
not depend on torch.
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
# NumPy types of: uint8, int8, uint16, int16, uint32, int32, float32, bool, uint64, int64,
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
_MAX_DIMS = 8
_MAX_DEPTH = 4  # arrays within arrays; files have none


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: `shape` in torch's order, `kind` of GGMLQuantizationType, `start` byte."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header: `values` by the file's own keys, lists for arrays."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a file. Raises WeightsError if it is not complete and valid."""
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Scan(data).header(path)
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist; give a .gguf file") from None
    except (ValueError, struct.error, OverflowError, MemoryError, OSError) as error:
        raise WeightsError(
            f"{path} is not a complete GGUF file ({str(error)[:120]}); fetch it again"
        ) from None


class _Scan:
    """Reads values in sequence and checks every length against the file's size."""

    def __init__(self, data: mmap.mmap) -> None:
        self._map, self._at = data, 0

    def header(self, path: Path) -> GgufHeader:
        """The header from the start of the file. Raises ValueError."""
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, values = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; versions 2 and 3, little-endian, can be read")
        fields: dict[str, Any] = {}
        for _ in range(values):
            key = self._text()
            if key in fields:
                raise ValueError(f"{key} occurs twice")
            fields[key] = self._value(self._unpack("<I")[0])
        table = [self._tensor() for _ in range(tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        begin = -(-self._at // alignment) * alignment
        placed = {t.name: StoredTensor(t.name, t.shape, t.kind, begin + t.start) for t in table}
        if len(placed) != len(table):
            raise ValueError("a tensor's name occurs twice")
        return GgufHeader(path, fields, placed)

    def _tensor(self) -> StoredTensor:
        name = self._text()
        [dims] = self._unpack("<I")
        if dims > _MAX_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        sizes = self._unpack(f"<{dims}Q")
        kind, start = self._unpack("<IQ")
        return StoredTensor(name, tuple(reversed(sizes)), kind, start)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], 1)[0]
        if kind != _ARRAY or depth > _MAX_DEPTH:
            raise ValueError(f"a value of kind {kind}")
        of, length = self._unpack("<IQ")
        if of in _NUMBERS:
            return self._numbers(_NUMBERS[of], length)
        return [self._value(of, depth + 1) for _ in range(length)]

    def _numbers(self, kind: str, count: int) -> list[Any]:
        dtype = np.dtype(kind)
        numbers: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype).tolist()
        return numbers

    def _text(self) -> str:
        # a token that is not UTF-8 must not prevent reading the weights; surrogates mark it
        return self._take(self._unpack("<Q")[0]).decode("utf-8", errors="surrogateescape")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._map):
            raise ValueError(f"it ends at byte {len(self._map)}, in the middle of its header")
        data = self._map[self._at : end]
        self._at = end
        return data
