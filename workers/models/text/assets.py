"""What belongs to weights besides tensors: tokenizer, special tokens, chat template, how generation
begins and ends.

They lie as files beside the weights, inside a GGUF file, or a checkpoint's manifest says that the
text was bytes. Knows
no torch and no model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError
from workers.models.gguf.header import read_gguf_header
from workers.models.gguf.tokenizer import tokenizer_files
from workers.models.hf.config import read_json
from workers.models.weights.locations import no_weights, place
from workers.models.weights.manifest import NAME as MANIFEST
from workers.models.weights.manifest import read_manifest

TOKENIZER = "tokenizer.json"
CONFIGURATION, GENERATION, TEMPLATE = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
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


def belongings(path: Path) -> dict[str, bytes]:
    """The files by name, of weights at `path` (as `open_weights` takes it); empty where nothing is
    known.

    A tokenizer.json beside a .gguf file stands above the one inside. Raises WeightsError for a
    tokenizer in a GGUF file
    that cannot be read.
    """
    where = place(path)
    if where.suffix == ".gguf" and where.is_file():
        beside = _in_folder(where.parent)
        if TOKENIZER in beside:
            return beside
        return {
            name: text.encode() for name, text in tokenizer_files(read_gguf_header(where)).items()
        }
    if not where.exists():
        return {}
    folder = where if where.is_dir() else where.parent
    found = _in_folder(folder)
    if not found and (folder / MANIFEST).is_file():
        found = _in_folder(folder.parent)  # a run keeps them beside its checkpoints
    return found


def reads_bytes(path: Path) -> bool:
    """Whether weights without a tokenizer know bytes, as far as can be told.

    A vocabulary of 256 is the bytes; and a checkpoint's manifest tells of a run on text without a
    tokenizer. Raises
    WeightsError, also where there are no weights.
    """
    where = place(path)
    if not where.exists():
        raise no_weights(where)
    if where.suffix == ".gguf":
        table = read_gguf_header(where).tensors.get("token_embd.weight")
        return table is not None and table.shape[:1] == (_BYTES,)
    folder = where if where.is_dir() else where.parent
    if not (folder / MANIFEST).is_file():
        if not (folder / "config.json").is_file():
            raise no_weights(folder)
        return read_json(folder / "config.json").get("vocab_size") == _BYTES
    manifest = read_manifest(folder)
    if _mapping(manifest.get("model")).get("vocab") == _BYTES:
        return True
    data = _mapping(_mapping(manifest.get("spec")).get("data"))
    if data.get("tokenizer") not in (None, "bytes"):
        return False
    sources = data.get("sources") or [data]
    return bool(data) and any(
        each.get("preset") or each.get("format", "text") != "tokens" for each in sources
    )


def keep(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into `folder`, each whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        beside = folder / f".{name}.{os.getpid()}"
        beside.write_bytes(data)
        os.replace(beside, folder / name)


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {}


def _in_folder(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
    except OSError as error:
        raise WeightsError(
            f"{error.filename} cannot be read: {error.strerror}; try chmod +r"
        ) from None
