"""Our own checkpoint folders as weights, of a training run or converted: torch's distributed checkpoint and a manifest.

Knows what is under `model.`; optimizer state is the training engine's.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from workers.contracts.base import problems_of
from workers.contracts.model import ModelSpec
from workers.models.errors import WeightsError
from workers.models.manifest import damage, read_manifest, seal
from workers.models.shapes import weight_shapes
from workers.models.weights import Weights, checked


class CheckpointFolder:
    """Weights of a folder with a manifest. Raises WeightsError for a damaged one, or one of another model."""

    def __init__(self, folder: Path) -> None:
        self.where, self.folder = str(folder), folder
        self._reader: Any = None
        manifest = read_manifest(folder)
        broken = damage(folder, manifest)
        if broken is not None:
            raise WeightsError(f"{folder}: {broken}; give an older checkpoint, or fetch it again")
        try:
            self.spec = ModelSpec.from_dict(manifest["model"])
        except (KeyError, TypeError, ValidationError) as error:
            says = str(problems_of(error)[0]) if isinstance(error, ValidationError) else "it names no model"
            raise WeightsError(f"{folder}: {says}; give a folder checkpoints/step-N") from None
        stored = _stored_dtypes(folder)
        shapes = weight_shapes(self.spec)
        missing = [name for name in shapes if f"model.{name}" not in stored]
        if missing:
            raise WeightsError(f"{folder} does not hold {missing[0]}, which its model has; give another checkpoint")
        self._shapes, self._dtypes = shapes, {name: stored[f"model.{name}"] for name in shapes}

    def read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        if self._reader is None:
            self._reader = _reader(self.folder)
        found = {f"model.{name}": torch.empty(self._shapes[name], dtype=self._dtypes[name])}
        with _telling(f"{self.where}: {name} cannot be read"):
            load(found, storage_reader=self._reader, no_dist=True)
        return checked(found[f"model.{name}"], name, self._shapes[name], self.where)


def save_checkpoint(weights: Weights, folder: Path) -> None:
    """Write into an existing, empty folder; holds all weights at once."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"model.{name}": weights.read(name) for name in weight_shapes(weights.spec)}
    with _telling(f"{folder.parent} cannot be written to"):
        save(tensors, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)
    seal(folder, {"step": 0, "tokens": 0, "samples": 0, "model": weights.spec.to_dict(), "weights_of": weights.where})


def _reader(folder: Path) -> Any:
    """Torch's, which reads the table of contents for every tensor anew: 46 ms each of SmolLM2's 272, so it is kept."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        @cache  # noqa: B019  lives as long as its checkpoint is read
        def read_metadata(self, *given: Any, **more: Any) -> Any:
            return super().read_metadata(*given, **more)

    return Reader(folder)


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Torch's CheckpointException is no Exception; its causes lie in it by rank."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a single process is meant
            yield
    except BaseException as error:
        failures = getattr(error, "failures", None)
        if not failures and not isinstance(error, Exception):
            raise
        cause = next(iter(failures.values()))[0] if failures else error
        if isinstance(cause, MemoryError):
            raise
        raise WeightsError(f"{what}: {str(cause)[:200]}") from error


class _PlainMetadata(pickle.Unpickler):
    """Torch keeps a checkpoint's table of contents as a pickle: only the classes it consists of are let through."""

    _KNOWN = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")})

    def find_class(self, module: str, name: str) -> Any:
        torchs_own = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._KNOWN or dtype or (torchs_own and name[:1].isalpha() and name[:1].isupper()):
            return super().find_class(module, name)
        if torchs_own and name in ("_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix"):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 pickles a member of an enumeration
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no table of contents does")


def _member(enumeration: Any, name: str) -> Enum:
    if isinstance(enumeration, EnumType) and name in enumeration.__members__:
        member: Enum = enumeration[name]
        return member
    raise pickle.UnpicklingError(f"it asks for {name} of {enumeration!r}, which is no member of an enumeration")


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    path = folder / ".metadata"
    try:
        table = _PlainMetadata(io.BytesIO(path.read_bytes())).load()
        return {
            name: entry.properties.dtype
            for name, entry in table.state_dict_metadata.items()
            if hasattr(entry, "properties")
        }
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}; give another checkpoint") from None
    except Exception as error:  # a broken pickle raises anything
        raise WeightsError(f"{path} is refused: {str(error)[:200]}; give a checkpoint that this engine wrote") from None
