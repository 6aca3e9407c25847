"""Checks media items that programs send: images, histograms, texts and tables. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from orchestrator.tracking.images import BadImage, ImageInfo, image_info

KINDS: Final = ("image", "histogram", "text", "table")
IMAGE_BYTES: Final = 5_000_000
TEXT_BYTES: Final = 64_000
TABLE_BYTES: Final = 1_000_000
ROWS: Final = 1000
COLUMNS: Final = 50
BINS: Final = 512
LONGEST_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class Checked:
    """One valid item; `image` and `data` are of images, `body` of the others."""

    name: str
    kind: str
    step: int
    index: int
    caption: str
    time: float
    digest: str
    body: Any = None
    image: ImageInfo | None = None
    data: bytes = b""
    bytes: int = 0  # of the body


def check(
    *, name: str, kind: str, step: int, index: int, caption: str, time: float, data: Any
) -> Checked:
    """The item with its fingerprint. Raises ValueError with a sentence for the sender."""
    if not 1 <= len(name) <= LONGEST_NAME:
        raise ValueError(f"name has {len(name)} characters; use 1 to {LONGEST_NAME}")
    image, bytes_, body = None, b"", None
    if kind == "image":
        bytes_ = _image_bytes(data)
        try:
            image = image_info(bytes_)
        except BadImage as error:
            raise ValueError(f"the image is not valid: {error}; send PNG or JPEG") from None
        content = bytes_
    else:
        body = {"histogram": _histogram, "text": _text, "table": _table}[kind](data)
        content = json.dumps(body, sort_keys=True).encode()
    digest = hashlib.sha256(json.dumps([kind, caption]).encode() + content).hexdigest()
    size = 0 if kind == "image" else len(content)
    return Checked(name, kind, step, index, caption, time, digest, body, image, bytes_, size)


def _image_bytes(data: Any) -> bytes:
    if not isinstance(data, str):
        raise ValueError("data of an image is its file as base64 text")
    if len(data) > IMAGE_BYTES * 4 // 3 + 4:
        raise ValueError(f"the image has more than {IMAGE_BYTES / 1e6:g} MB; send a smaller one")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("data is not base64") from None


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError("data of a text is a text")
    size = len(data.encode(errors="replace"))
    if size > TEXT_BYTES:
        raise ValueError(f"the text has {size:,} bytes; send at most {TEXT_BYTES:,}")
    return data.replace("\0", "")


def _histogram(data: Any) -> dict[str, list[float]]:
    if not isinstance(data, dict) or set(data) != {"counts", "edges"}:
        raise ValueError("data of a histogram is {counts: [n numbers], edges: [n + 1 numbers]}")
    counts, edges = _numbers(data["counts"], "counts"), _numbers(data["edges"], "edges")
    if not 1 <= len(counts) <= BINS:
        raise ValueError(f"the histogram has {len(counts)} bins; send 1 to {BINS}")
    if len(edges) != len(counts) + 1:
        raise ValueError(
            f"the histogram has {len(counts)} counts and {len(edges)} edges; send one edge more "
            "than counts"
        )
    if min(counts) < 0:
        raise ValueError(f"the count {min(counts):g} is negative")
    if any(after <= before for before, after in pairwise(edges)):
        raise ValueError("edges do not ascend")
    return {"counts": counts, "edges": edges}


def _numbers(values: Any, field: str) -> list[float]:
    is_list = isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    try:
        numbers = [float(value) for value in values] if is_list else [math.nan]
    except OverflowError:  # an integer above the largest float
        numbers = [math.inf]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{field} is not a list of finite numbers")
    return numbers


def _table(data: Any) -> dict[str, list[Any]]:
    if not isinstance(data, dict) or set(data) != {"columns", "rows"}:
        raise ValueError("data of a table is {columns: [names], rows: [[cells]]}")
    columns, rows = data["columns"], data["rows"]
    if not isinstance(columns, list) or not 1 <= len(columns) <= COLUMNS:
        raise ValueError(f"a table has a list of 1 to {COLUMNS} columns")
    if not isinstance(rows, list) or len(rows) > ROWS:
        raise ValueError(f"a table has a list of at most {ROWS:,} rows")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError(f"row {number} of the table does not have {len(columns)} cells")
    table = {
        "columns": [_cell(name) for name in columns],
        "rows": [[_cell(cell) for cell in row] for row in rows],
    }
    size = len(json.dumps(table).encode())
    if size > TABLE_BYTES:
        raise ValueError(f"the table has {size:,} bytes; send at most {TABLE_BYTES:,}")
    return table


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("\0", "")[:2000]
