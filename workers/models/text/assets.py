"""Assets of weights: tokenizer, special tokens, chat template, generation settings.

They are files next to the weights or inside a GGUF file; a checkpoint's manifest may say that its
text was bytes. Does not depend on torch or on models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError
from workers.models.gguf.header import read_gguf_header
from workers.models.gguf.tokenizer import tokenizer_files
from workers.models.hf.weights_config import read_json
from workers.models.weights.locations import no_weights_error, resolve_weights_path
from workers.models.weights.manifest import NAME as MANIFEST
from workers.models.weights.manifest import read_manifest

TOKENIZER = "tokenizer.json"
CONFIGURATION, GENERATION, TEMPLATE = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
ADAPTER_CONFIGURATION = "adapter_config.json"  # PEFT's
_BYTES = 256
NAMES = (
    TOKENIZER,
    CONFIGURATION,
    GENERATION,
    TEMPLATE,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


def read_assets(path: Path) -> dict[str, bytes]:
    """The asset files by name, of weights at `path` (as for `open_weights`); may be empty.

    A tokenizer.json next to a .gguf file takes precedence over the one inside; an adapter's folder
    without any has those of its base. Raises WeightsError for a tokenizer in a GGUF file that
    cannot be read.
    """
    where = _base_of(resolve_weights_path(path))
    if where.suffix == ".gguf" and where.is_file():
        files = _in_folder(where.parent)
        if TOKENIZER in files:
            return files
        return {
            name: text.encode() for name, text in tokenizer_files(read_gguf_header(where)).items()
        }
    if not where.exists():
        return {}
    folder = where if where.is_dir() else where.parent
    files = _in_folder(folder)
    if not files and (folder / MANIFEST).is_file():
        files = _in_folder(folder.parent)  # a run saves them next to its checkpoints
    return files


def reads_bytes(path: Path) -> bool:
    """Whether weights without a tokenizer read raw bytes, as far as can be determined.

    That is a vocabulary of 256, or a checkpoint of a run on text without a tokenizer. Raises
    WeightsError, also if there are no weights.
    """
    where = _base_of(resolve_weights_path(path))
    if not where.exists():
        raise no_weights_error(where)
    if where.suffix == ".gguf":
        table = read_gguf_header(where).tensors.get("token_embd.weight")
        return table is not None and table.shape[:1] == (_BYTES,)
    folder = where if where.is_dir() else where.parent
    if not (folder / MANIFEST).is_file():
        if not (folder / "config.json").is_file():
            raise no_weights_error(folder)
        return read_json(folder / "config.json").get("vocab_size") == _BYTES
    manifest = read_manifest(folder)
    if _mapping(manifest.get("model")).get("vocab") == _BYTES:
        return True
    data = _mapping(_mapping(manifest.get("spec")).get("data"))
    if data.get("tokenizer") not in (None, "bytes"):
        return False
    sources = data.get("sources") or [data]
    return bool(data) and any(
        source.get("preset") or source.get("format", "text") != "tokens" for source in sources
    )


def weights_folder(path: Path) -> Path:
    """The folder of weights at `path`; of an adapter without assets that of its base."""
    return _base_of(resolve_weights_path(path))


def _base_of(where: Path) -> Path:
    """The base's weights if `where` is a PEFT folder without assets of its own."""
    configuration = where / ADAPTER_CONFIGURATION
    if not configuration.is_file() or (where / MANIFEST).is_file():
        return where
    if any((where / name).is_file() for name in NAMES):
        return where
    base = Path(str(read_json(configuration).get("base_model_name_or_path") or ""))
    return resolve_weights_path(base) if base.is_absolute() and base.exists() else where


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into `folder`, each atomically. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_bytes(data)
        os.replace(temporary, folder / name)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _in_folder(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
    except OSError as error:
        raise WeightsError(
            f"{error.filename} cannot be read: {error.strerror}. Run chmod +r on it."
        ) from None
