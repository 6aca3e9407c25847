"""Where weights lie: a Hugging Face folder, a GGUF file, a checkpoint of ours, or an installed package with one.

Picks the reader; does not read.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from workers.contracts.model import ModelSource
from workers.models.checkpoint import CheckpointFolder
from workers.models.errors import WeightsError
from workers.models.gguf_file import GgufFile
from workers.models.hf.folder import HuggingFaceFolder, refuse_pickles
from workers.models.manifest import NAME, complete_checkpoints
from workers.models.weights import Weights


def open_source(source: ModelSource) -> Weights:
    """Raises WeightsError when there are no weights at the path or in the package."""
    if source.package is not None:
        return open_weights(_in_package(source.package))
    assert source.path is not None
    return open_weights(Path(source.path))


def open_weights(path: Path) -> Weights:
    """The weights at `path`; of a run's `checkpoints` folder the newest. Raises WeightsError."""
    if path.is_dir():
        if (path / NAME).is_file():
            return CheckpointFolder(path)
        if (path / "config.json").is_file():
            return HuggingFaceFolder(path)
        kept = complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
        if kept:
            return CheckpointFolder(kept[0])
        refuse_pickles(list(path.iterdir()), str(path))
        says = "holds neither a config.json (Hugging Face) nor a manifest.json (a checkpoint)"
        raise WeightsError(f"{path} {says}; give a folder of one of them, or a .gguf file")
    if not path.exists():
        raise WeightsError(f"{path} does not exist; give a Hugging Face folder, a checkpoint's folder or a .gguf file")
    refuse_pickles([path], str(path.parent))
    if path.suffix == ".gguf":
        return GgufFile(path)
    if path.suffix == ".safetensors":
        return HuggingFaceFolder(path.parent)
    raise WeightsError(f"{path} is no kind of weights known here; give a folder or a .gguf file")


def _in_package(package: str) -> Path:
    """The one file or folder of weights among an installed package's files; its code is not run."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise WeightsError(f"package {package} is not installed; install it on every node, or give a path") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf" or file.name == "config.json"]
    if len(found) != 1:
        says = f"{len(found)} files of weights" if found else "no .gguf file and no config.json"
        raise WeightsError(f"package {package} holds {says}; give the path of one")
    return found[0] if found[0].suffix == ".gguf" else found[0].parent
