"""The reader of weights by what lies at their place: a Hugging Face folder, a GGUF file, a
checkpoint of ours.

Picks the reader; does not read.
"""

from __future__ import annotations

from pathlib import Path

from workers.contracts.specs.model import ModelSource
from workers.models.errors import WeightsError
from workers.models.gguf.file import GgufFile
from workers.models.hf.folder import HuggingFaceFolder, refuse_pickles
from workers.models.weights.locations import no_weights, place, placement_of
from workers.models.weights.manifest import NAME
from workers.models.weights.orrery_checkpoint import CheckpointFolder
from workers.models.weights.reader import Weights


def open_source(source: ModelSource) -> Weights:
    """Raises WeightsError when there are no weights at the path or in the package."""
    return open_weights(placement_of(source))


def open_weights(path: Path) -> Weights:
    """The weights at `path`; of a run's `checkpoints` folder the newest. Raises WeightsError."""
    path = place(path)
    if path.is_dir():
        if (path / NAME).is_file():
            return CheckpointFolder(path)
        if (path / "config.json").is_file():
            return HuggingFaceFolder(path)
        refuse_pickles(list(path.iterdir()), str(path))
        raise no_weights(path)
    if not path.exists():
        raise no_weights(path)
    refuse_pickles([path], str(path.parent))
    if path.suffix == ".gguf":
        return GgufFile(path)
    if path.suffix == ".safetensors":
        return HuggingFaceFolder(path.parent)
    raise WeightsError(f"{path} is no kind of weights known here; give a folder or a .gguf file")
