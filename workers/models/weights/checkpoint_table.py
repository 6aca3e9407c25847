"""The table of contents of our checkpoints, read without running code: torch keeps it as a pickle.

Knows which classes such a table consists of; does not know models, or what is done with the
tensors.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch

from workers.models.errors import WeightsError

_NAME = ".metadata"


def read_table(folder: Path) -> Any:
    """Torch's `Metadata` of a checkpoint's folder. Raises WeightsError where it is none, or more
    than a table.

    Entries that are no tensors are refused too: torch unpickles them whatever they hold.
    """
    path = folder / _NAME
    try:
        table = _PlainTable(io.BytesIO(path.read_bytes())).load()
        other = [
            name
            for name, entry in table.state_dict_metadata.items()
            if not hasattr(entry, "properties")
        ]
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read: {error.strerror}; give another checkpoint"
        ) from None
    except Exception as error:  # a broken pickle raises anything
        raise WeightsError(
            f"{path} is refused: {str(error)[:200]}; give a checkpoint that this engine wrote"
        ) from None
    if other:
        message = f"{other[0]} is no tensor in it, but bytes that would be unpickled"
        raise WeightsError(
            f"{path} is refused: {message}; give a checkpoint that this engine wrote"
        )
    return table


def table_reader(folder: Path) -> Any:
    """Torch's reader of a checkpoint's files, with the table that `read_table` gives, read once:
    torch would unpickle
    it for every tensor anew, 46 ms each of SmolLM2's 272. Loads torch.distributed."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        table: Any = None

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if self.table is None:
                self.table = read_table(folder)
                if getattr(self.table, "storage_meta", None) is None:
                    self.table.storage_meta = StorageMeta()
                self.table.storage_meta.load_id = self.load_id
            return self.table

    return Reader(folder)


class _PlainTable(pickle.Unpickler):
    """Only the classes that a table consists of are let through."""

    _KNOWN = frozenset(
        {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
    )

    def find_class(self, module: str, name: str) -> Any:
        torchs_own = module in (
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
        )
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (
            (module, name) in self._KNOWN
            or dtype
            or (torchs_own and name[:1].isalpha() and name[:1].isupper())
        ):
            return super().find_class(module, name)
        if torchs_own and name in ("_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix"):
            return super().find_class(module, name)
        # how Python before 3.11.4 pickles a member of an enumeration
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents does")


def _member(enumeration: Any, name: str) -> Enum:
    if isinstance(enumeration, EnumType) and name in enumeration.__members__:
        member: Enum = enumeration[name]
        return member
    raise pickle.UnpicklingError(
        f"it asks for {name} of {enumeration!r}, which is no member of an enumeration"
    )
