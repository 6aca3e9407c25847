"""The files of a program at the time of its submit, packed as one text, with a fingerprint.

Names are relative and stay below the program's folder. Does not read or write files.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Final

from pydantic import Field, ValidationError, model_validator

from workers.contracts.base import WireContract

MOST_FILES: Final = 2000
MOST_ORIGINALS: Final = 2000
MOST_BYTES: Final = 4 << 20  # of all files of a program
_MOST_UNPACKED: Final = 64 << 20  # as JSON, where base64 and escapes need more
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ProgramFile(WireContract):
    """One file: UTF-8 text, else base64; or a link to a name below the program's folder."""

    text: str | None = None
    base64: str | None = None
    link: str | None = None
    executable: bool = False

    @model_validator(mode="after")
    def _one_content(self) -> ProgramFile:
        if sum(each is not None for each in (self.text, self.base64, self.link)) != 1:
            raise ValueError("a file has either text, base64 or link")
        if self.base64 is not None:
            base64.b64decode(self.base64, validate=True)
        return self

    @classmethod
    def of(cls, data: bytes, *, executable: bool = False) -> ProgramFile:
        """The file with these bytes."""
        try:
            return cls(text=data.decode(), executable=executable)
        except UnicodeDecodeError:
            return cls(base64=base64.b64encode(data).decode(), executable=executable)

    @property
    def data(self) -> bytes:
        """The bytes of the file; of a link, its target."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return (self.text if self.text is not None else self.link or "").encode()


class ProgramFiles(WireContract):
    """`{name: file}`. Raises ValidationError for a name or link that leaves the folder."""

    files: Annotated[dict[str, ProgramFile], Field(max_length=MOST_FILES)] = {}

    @model_validator(mode="after")
    def _below(self) -> ProgramFiles:
        for name, file in self.files.items():
            if not is_below(name):
                raise ValueError(f"{name!r} is not a name below the program's folder")
            if file.link is not None and not is_below(link_target(name, file.link)):
                raise ValueError(f"the link {name!r} leaves the program's folder")
        for name in self.files:
            for parent in PurePosixPath(name).parents:
                if str(parent) in self.files:
                    raise ValueError(f"{str(parent)!r} is a file and a folder")
        return self

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names and contents."""
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            kind = "link" if file.link is not None else "program" if file.executable else "file"
            inner = hashlib.sha256(file.data).hexdigest()
            digest.update(f"{name}\0{kind}\0{inner}\n".encode())
        return digest.hexdigest()

    @property
    def size(self) -> int:
        """The size of all files."""
        return sum(len(file.data) for file in self.files.values())

    def packed(self) -> bytes:
        """Compressed JSON."""
        return zlib.compress(self.model_dump_json(exclude_defaults=True).encode(), 6)

    @classmethod
    def unpacked(cls, data: bytes) -> ProgramFiles:
        """Raises ValueError for data that `packed` did not write."""
        engine = zlib.decompressobj()
        try:
            text = engine.decompress(data, _MOST_UNPACKED)
        except zlib.error as error:
            raise ValueError(f"the program cannot be unpacked: {error}") from None
        if not engine.eof:
            raise ValueError("the program is incomplete or too large")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"the program cannot be unpacked: {error}") from None


class ProgramOrder(WireContract):
    """The program of a launch order: its files as base64 of `ProgramFiles.packed`.

    `folder` is where they were at submission; `originals` are names there that are not part of the
    program, such as data and large files, and are linked. `start` is the work folder below it.
    """

    packed: str
    fingerprint: Sha256
    folder: str
    start: str = ""
    originals: Annotated[list[str], Field(max_length=MOST_ORIGINALS)] = []
    commit: str = ""

    @model_validator(mode="after")
    def _below(self) -> ProgramOrder:
        for name in (*self.originals, *([self.start] if self.start else [])):
            if not is_below(name):
                raise ValueError(f"{name!r} is not a name below the program's folder")
        return self

    @classmethod
    def text_of(cls, packed: bytes) -> str:
        """The text of `packed`."""
        return base64.b64encode(packed).decode()

    def files(self) -> Mapping[str, ProgramFile]:
        """`{name: file}`. Raises ValueError if they are damaged."""
        content = ProgramFiles.unpacked(base64.b64decode(self.packed, validate=True))
        if content.fingerprint != self.fingerprint:
            raise ValueError("the program does not have the fingerprint of its run")
        return content.files


def is_below(name: str) -> bool:
    """Whether the name is relative, plain and does not leave its folder."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= 1000
        and "\0" not in name
        and not path.is_absolute()
        and ".." not in path.parts
        and str(path) == name
        and name != "."
    )


def link_target(name: str, link: str) -> str:
    """The name that a link means; it starts with `..` or `/` if it leaves the folder."""
    if posixpath.isabs(link):
        return link
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
