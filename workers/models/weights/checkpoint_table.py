"""The table of contents of Orrery checkpoints, a pickle of torch, read without running code.

Does not depend on models.
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
    """Torch's `Metadata` of a checkpoint's folder. Raises WeightsError for anything else.

    Entries other than tensors are refused because torch unpickles their content.
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
        message = f"{other[0]} is not a tensor, but bytes that would be unpickled"
        raise WeightsError(
            f"{path} is refused: {message}; give a checkpoint that this engine wrote"
        )
    return table


def checkpoint_reader(folder: Path) -> Any:
    """Torch's reader of a checkpoint's files with the table of `read_table`, read once.

    Torch would unpickle it for every tensor (46 ms each for the 272 of SmolLM2). Imports
    torch.distributed.
    """
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
    """Unpickles only the classes that a table consists of."""

    _KNOWN = frozenset(
        {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
    )

    def find_class(self, module: str, name: str) -> Any:
        """The class, if a table may contain it; raises UnpicklingError otherwise."""
        from_torch = module in (
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
        )
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (
            (module, name) in self._KNOWN
            or dtype
            or (from_torch and name[:1].isalpha() and name[:1].isupper())
        ):
            return super().find_class(module, name)
        if from_torch and name in ("_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix"):
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
        f"it requests {name} of {enumeration!r}, which is not a member of an enumeration"
    )
