"""Our own checkpoint folders as weights, of a training run or converted: torch's distributed
checkpoint and a manifest.

Knows what is under `model.`; optimizer state is the training engine's.
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
from workers.models.weights.checkpoint_table import read_table, table_reader
from workers.models.weights.manifest import damage, read_manifest, seal
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import Weights, checked


class CheckpointFolder:
    """Weights of a folder with a manifest.

    Raises WeightsError for a damaged one, or one of another model.
    """

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
            message = (
                str(validation_problems(error)[0])
                if isinstance(error, ValidationError)
                else "it names no model"
            )
            raise WeightsError(f"{folder}: {message}; give a folder checkpoints/step-N") from None
        table = read_table(folder).state_dict_metadata
        stored = {name: entry.properties.dtype for name, entry in table.items()}
        shapes = weight_shapes(self.spec)
        missing = [name for name in shapes if f"model.{name}" not in stored]
        if missing:
            raise WeightsError(
                f"{folder} does not hold {missing[0]}, which its model has; give another checkpoint"
            )
        self._shapes, self._dtypes = shapes, {name: stored[f"model.{name}"] for name in shapes}

    def read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        if self._reader is None:
            self._reader = table_reader(self.folder)
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
        save(
            tensors,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=True),
            no_dist=True,
        )
    seal(
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
