"""Turns images, numbers and tables of a program into media items of the server.

Standard library only; accepts NumPy arrays, tensors and Pillow images by their methods.
"""

from __future__ import annotations

import base64
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BINS = 64


def image(data: Any) -> str:
    """An image as base64 of a PNG or JPEG file.

    `data` is the file's bytes, its path, a Pillow image or matplotlib figure (`savefig`), or an
    array (height, width) or (height, width, 1 | 3 | 4) of integers 0 to 255 or floats 0 to 1.
    """
    return base64.b64encode(_file(data)).decode()


def _file(data: Any) -> bytes:
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    if isinstance(data, (str, os.PathLike)):
        return Path(data).read_bytes()
    for method in ("savefig", "save"):
        if hasattr(data, method):
            import io

            buffer = io.BytesIO()
            getattr(data, method)(buffer, format="png" if method == "savefig" else "PNG")
            return buffer.getvalue()
    return png(_plain(data))


def png(rows: Any) -> bytes:
    """A PNG file of nested lists (height, width) or (height, width, channels).

    Raises ValueError.
    """
    if not rows or not rows[0]:
        raise ValueError("the image has no pixels")
    first = rows[0][0]
    channels = len(first) if isinstance(first, list) else 1
    kinds = {1: 0, 3: 2, 4: 6}  # grayscale, RGB, RGBA
    if channels not in kinds:
        raise ValueError(f"the image has {channels} channels; use 1, 3 or 4")
    is_float = isinstance(first[0] if isinstance(first, list) else first, float)
    lines = b"".join(
        b"\0"
        + bytes(
            _byte(value, is_float)
            for pixel in row
            for value in (pixel if isinstance(pixel, list) else (pixel,))
        )
        for row in rows
    )
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, kinds[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )


def _byte(value: Any, is_float: bool) -> int:
    number = float(value) * 255 if is_float else float(value)
    return 0 if number != number else min(255, max(0, round(number)))


def histogram(values: Any, bins: int = BINS) -> dict[str, list[float]]:
    """`{counts, edges}` of the finite numbers in bins of equal width. Raises ValueError."""
    numbers = [number for number in _numbers(_plain(values)) if math.isfinite(number)]
    if not numbers:
        raise ValueError("there is no finite number")
    low, high = min(numbers), max(numbers)
    if low == high:
        spread = abs(low) * 1e-6 or 0.5
        low, high = low - spread, high + spread
    counts = [0] * bins
    for number in numbers:
        counts[min(bins - 1, int((number - low) / (high - low) * bins))] += 1
    edges = [low + (high - low) * place / bins for place in range(bins)] + [high]
    return {"counts": [float(count) for count in counts], "edges": edges}


def table(columns: Sequence[Any], rows: Iterable[Iterable[Any]]) -> dict[str, list[Any]]:
    """`{columns, rows}` with cells that JSON represents."""
    return {
        "columns": [str(name) for name in columns],
        "rows": [[_cell(c) for c in r] for r in rows],
    }


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    plain = _plain(value)
    return plain if isinstance(plain, (bool, int, float, str)) else str(value)


def _plain(data: Any) -> Any:
    """Lists or a number of an array or tensor."""
    if hasattr(data, "detach"):  # a tensor that may require gradients or be on a GPU
        data = data.detach().cpu()
    return data.tolist() if hasattr(data, "tolist") else data


def _numbers(data: Any) -> Iterable[float]:
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _numbers(item)
    else:
        yield float(data)
