"""Opens weights of any format: a Hugging Face folder, a GGUF file, an Orrery checkpoint."""

from __future__ import annotations

from pathlib import Path

from workers.contracts.specs.model import ModelSource
from workers.models.adapters.merged import open_adapter
from workers.models.adapters.peft_files import is_adapter
from workers.models.errors import WeightsError
from workers.models.gguf.file import GgufFile
from workers.models.hf.folder import HuggingFaceFolder, refuse_pickles
from workers.models.weights.locations import locate_weights, no_weights_error, resolve_weights_path
from workers.models.weights.manifest import NAME
from workers.models.weights.orrery_checkpoint import CheckpointFolder
from workers.models.weights.reader import Weights


def open_source(source: ModelSource) -> Weights:
    """The weights at a path or in a package. Raises WeightsError if there are none."""
    return open_weights(locate_weights(source))


def open_weights(path: Path) -> Weights:
    """The weights at `path`, of a run's `checkpoints` folder the newest. Raises WeightsError."""
    path = resolve_weights_path(path)
    if path.is_dir():
        if is_adapter(path):
            return open_adapter(path, open_weights)
        if (path / NAME).is_file():
            return CheckpointFolder(path)
        if (path / "config.json").is_file():
            return HuggingFaceFolder(path)
        refuse_pickles(list(path.iterdir()), str(path))
        raise no_weights_error(path)
    if not path.exists():
        raise no_weights_error(path)
    refuse_pickles([path], str(path.parent))
    if path.suffix == ".gguf":
        return GgufFile(path)
    if path.suffix == ".safetensors":
        return HuggingFaceFolder(path.parent)
    raise WeightsError(f"{path} is not a known kind of weights; give a folder or a .gguf file")
