"""Writes weights as a Hugging Face folder: config.json, safetensors files and their index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from workers.models.errors import WeightsError
from workers.models.hf.folder import INDEX, SINGLE
from workers.models.hf.names import tensor_entries
from workers.models.hf.writing import family_for, write_config
from workers.models.weights.reader import Weights

MAX_FILE_BYTES = 5 * 10**9  # as transformers splits


def save_hugging_face(
    weights: Weights,
    folder: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    packed: Mapping[str, Mapping[str, Tensor]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write into an existing, empty folder, with one file's tensors in memory. Raises WeightsError.

    `packed`: quantized tensors that replace a tensor, by its name in the file; `more` is added to
    config.json.
    """
    spec = weights.spec
    family = family_for(spec)
    dtype = str(weights.read("embed.weight").dtype).removeprefix("torch.")
    config = {**write_config(spec, dtype=dtype), **(more or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in _tensors(weights, family, packed or {}):
        if pending and size + tensor.nbytes > max_file_bytes:
            parts.append(_write(pending, folder, len(parts)))
            pending, size = {}, 0
        pending[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    parts.append(_write(pending, folder, len(parts)))
    if len(parts) == 1:
        _part(folder, 0).rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        _part(folder, number).rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(
    weights: Weights, family: str, packed: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    for entry in tensor_entries(weights.spec, family):
        if all(theirs in packed for theirs in entry.theirs):
            for theirs in entry.theirs:
                yield from packed[theirs].items()
            continue
        tensors = entry.to_theirs([weights.read(name) for name in entry.ours])
        yield from zip(entry.theirs, tensors, strict=True)


def _write(tensors: dict[str, Tensor], folder: Path, number: int) -> list[str]:
    try:
        save_file(tensors, _part(folder, number), metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk too
        raise WeightsError(
            f"{folder.parent} cannot be written to: {error}; free some space"
        ) from None
    return list(tensors)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number}"
