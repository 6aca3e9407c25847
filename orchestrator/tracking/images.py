"""Type and size of a PNG or JPEG image by its structure, without decoding its pixels. Pure.

PNG: ISO/IEC 15948 (signature, chunks with CRC-32, IHDR first, IEND last). JPEG: ITU-T T.81 (SOI,
segments, a frame header, EOI).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

_PNG: Final = b"\x89PNG\r\n\x1a\n"
# markers of frame headers; C4, C8 and CC are tables
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE: Final = frozenset((0x01, *range(0xD0, 0xD8)))  # markers without a length
MOST_PIXELS: Final = 40_000_000


class BadImage(ValueError):
    """The bytes are not a complete PNG or JPEG image; the message says why."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The content type, and the size in pixels."""

    content_type: str
    width: int
    height: int


def image_info(data: bytes) -> ImageInfo:
    """Type and size of an image. Raises BadImage."""
    if data.startswith(_PNG):
        info = _png(data)
    elif data.startswith(b"\xff\xd8"):
        info = _jpeg(data)
    else:
        raise BadImage("it is neither PNG nor JPEG")
    if not info.width or not info.height:
        raise BadImage(f"its size is {info.width} × {info.height} pixels")
    if info.width * info.height > MOST_PIXELS:
        raise BadImage(
            f"it has {info.width} × {info.height} pixels, at most {MOST_PIXELS:,} are stored"
        )
    return info


def _png(data: bytes) -> ImageInfo:
    at, size, has_pixels = len(_PNG), None, False
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, end = data[at + 4 : at + 8], at + 12 + length
        if end > len(data):
            break
        (crc,) = struct.unpack_from(">I", data, end - 4)
        if zlib.crc32(data[at + 4 : end - 4]) != crc:
            raise BadImage(f"the checksum of its chunk at byte {at} is wrong")
        if size is None:
            if kind != b"IHDR" or length != 13:
                raise BadImage("its first chunk is not IHDR")
            size = struct.unpack_from(">II", data, at + 8)
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == b"IEND":
            if not has_pixels:
                raise BadImage("it has no pixels")
            return ImageInfo("image/png", *size)
        at = end
    raise BadImage("the PNG ends too early")


def _jpeg(data: bytes) -> ImageInfo:
    at, size = 2, None
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise BadImage(f"byte {at} of the JPEG is not a marker")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker in _FRAMES and at + 9 <= len(data):
            height, width = struct.unpack_from(">HH", data, at + 5)
            size = (width, height)
        if marker == 0xDA:  # pixels follow
            if size is None:
                raise BadImage("the JPEG has no frame header")
            if data.rfind(b"\xff\xd9") < at:
                raise BadImage("the JPEG ends too early")
            return ImageInfo("image/jpeg", *size)
        at += 2 + max(2, length)
    raise BadImage("the JPEG ends too early")
