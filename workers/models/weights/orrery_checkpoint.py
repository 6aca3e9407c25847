"""Orrery checkpoint folders as weights: torch's distributed checkpoint and a manifest.

Reads entries under `model.` only; optimizer state belongs to the training engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from workers.contracts.base import validation_problems
from workers.contracts.specs.model import ModelSpec
from workers.models.errors import WeightsError
from workers.models.weights.checkpoint_table import checkpoint_reader, read_table
from workers.models.weights.manifest import find_damage, read_manifest, write_manifest
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import Weights, checked


class CheckpointFolder:
    """Weights of a folder with a manifest. Raises WeightsError for a damaged or unsuitable one."""

    def __init__(self, folder: Path) -> None:
        self.where, self.folder = str(folder), folder
        self._reader: Any = None
        manifest = read_manifest(folder)
        broken = find_damage(folder, manifest)
        if broken is not None:
            raise WeightsError(f"{folder}: {broken}; give an older checkpoint, or fetch it again")
        try:
            self.spec = ModelSpec.from_dict(manifest["model"])
        except (KeyError, TypeError, ValidationError) as error:
            message = (
                str(validation_problems(error)[0])
                if isinstance(error, ValidationError)
                else "it has no model"
            )
            raise WeightsError(f"{folder}: {message}; give a folder checkpoints/step-N") from None
        table = read_table(folder).state_dict_metadata
        stored = {name: entry.properties.dtype for name, entry in table.items()}
        shapes = weight_shapes(self.spec)
        missing = [name for name in shapes if f"model.{name}" not in stored]
        if missing:
            raise WeightsError(
                f"{folder} has no {missing[0]}, which its model needs; give another checkpoint"
            )
        self._shapes, self._dtypes = shapes, {name: stored[f"model.{name}"] for name in shapes}

    def read(self, name: str) -> Tensor:
        """The tensor `name`. Raises WeightsError."""
        from torch.distributed.checkpoint.state_dict_loader import load

        if self._reader is None:
            self._reader = checkpoint_reader(self.folder)
        tensors = {f"model.{name}": torch.empty(self._shapes[name], dtype=self._dtypes[name])}
        with _as_weights_error(f"{self.where}: {name} cannot be read"):
            load(tensors, storage_reader=self._reader, no_dist=True)
        return checked(tensors[f"model.{name}"], name, self._shapes[name], self.where)


def save_checkpoint(weights: Weights, folder: Path) -> None:
    """Write into an existing, empty folder; needs memory for all weights."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"model.{name}": weights.read(name) for name in weight_shapes(weights.spec)}
    with _as_weights_error(f"{folder.parent} cannot be written to"):
        save(
            tensors,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=True),
            no_dist=True,
        )
    write_manifest(
        folder,
        {
            "step": 0,
            "tokens": 0,
            "samples": 0,
            "model": weights.spec.to_dict(),
            "weights_of": weights.where,
        },
    )


@contextmanager
def _as_weights_error(what: str) -> Iterator[None]:
    """Convert errors, also torch's CheckpointException: a BaseException with causes by rank."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about a single process
            yield
    except BaseException as error:
        failures = getattr(error, "failures", None)
        if not failures and not isinstance(error, Exception):
            raise
        cause = next(iter(failures.values()))[0] if failures else error
        if isinstance(cause, MemoryError):
            raise
        raise WeightsError(f"{what}: {str(cause)[:200]}") from error
