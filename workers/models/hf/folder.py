"""A Hugging Face folder as weights: config.json and one or many safetensors files.

Pickle files (`.bin`, `.pt`) are refused because reading one runs code. Does not depend on models
beyond their tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.models.errors import WeightsError
from workers.models.hf.names import Entry, tensor_entries
from workers.models.hf.quantized_formats import Packed, read_quantization, unpack
from workers.models.hf.weights_config import read_json, read_shape
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import checked

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# tables in some published files that follow from the configuration
_DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "_scale_inv")


class HuggingFaceFolder:
    """Weights of a known family. Raises WeightsError for missing, foreign or broken tensors."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        config = read_json(folder / "config.json")
        self.family, self.spec = read_shape(
            config, label=str(folder / "config.json"), name=folder.name
        )
        self.quantization = read_quantization(config, self.where)
        self._files = _files(folder)
        self._prefix = (
            "transformer." if self.family == "gpt2" and "wte.weight" in self._files else ""
        )
        self._shapes = weight_shapes(self.spec)
        entries = tensor_entries(self.spec, self.family)
        self._entries: dict[str, Entry] = {name: entry for entry in entries for name in entry.ours}
        self._last: tuple[Entry, list[Tensor]] | None = None
        self._open: tuple[Path, Any] | None = None
        self._check_names(entries)

    def read(self, name: str) -> Tensor:
        """The tensor `name`, dequantized. Raises WeightsError."""
        entry = self._entries[name]
        if self._last is None or self._last[0] is not entry:
            self._last = (entry, entry.to_ours([self._read(theirs) for theirs in entry.theirs]))
        return checked(self._last[1][entry.ours.index(name)], name, self._shapes[name], self.where)

    def packed(self, name: str) -> list[Packed] | None:
        """The quantized weight, one per expert; None if not quantized or joined with others."""
        entry = self._entries[name]
        stored = [theirs.removeprefix(self._prefix) for theirs in entry.theirs]
        if entry.layout not in ("same", "stacked") or not all(
            self._quantized(item) for item in stored
        ):
            return None
        return [self._unpacked(item) for item in stored]

    def _read(self, theirs: str) -> Tensor:
        stored = theirs.removeprefix(self._prefix)
        if self._quantized(stored):
            return self._unpacked(stored).weight()
        tensor = self._tensor(stored)
        if tensor.dtype == torch.float8_e4m3fn:
            message = f"{stored} is fp8 without its scales {stored}_scale_inv"
            raise WeightsError(f"{self.where}: {message}; fetch the folder again")
        return tensor

    def _quantized(self, stored: str) -> bool:
        scheme, prefix = self.quantization, stored.removesuffix(".weight")
        return scheme is not None and prefix != stored and f"{prefix}.{scheme.mark}" in self._files

    def _unpacked(self, stored: str) -> Packed:
        assert self.quantization is not None
        return unpack(self.quantization, stored.removesuffix(".weight"), self._tensor, self.where)

    def _tensor(self, stored: str) -> Tensor:
        """The tensor from its file, which stays open: experts can be 768 tensors per layer."""
        path = self._files[stored]
        try:
            if self._open is None or self._open[0] != path:
                self._open = (path, safe_open(path, "pt"))
            tensor: Tensor = self._open[1].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise _broken(path, error) from None
        return tensor

    def _check_names(self, entries: list[Entry]) -> None:
        expected: set[str] = set()
        for stored in (
            theirs.removeprefix(self._prefix) for entry in entries for theirs in entry.theirs
        ):
            scheme = self.quantization if self._quantized(stored) else None
            expected |= (
                {stored} if scheme is None else set(scheme.parts(stored.removesuffix(".weight")))
            )
        missing = sorted(expected - self._files.keys())
        if missing:
            message = f"{len(missing)} tensors are missing, the first is {missing[0]}"
            raise WeightsError(
                f"{self.where}: {message}; fetch the folder again, or correct its config.json"
            )
        foreign = sorted(
            name for name in self._files.keys() - expected if not self._is_ignored(name)
        )
        if foreign:
            message = (
                f"{len(foreign)} tensors belong to no {self.family} of this configuration, the "
                f"first is {foreign[0]}"
            )
            raise WeightsError(f"{self.where}: {message}; give the configuration of these weights")

    def _is_ignored(self, name: str) -> bool:
        if name.endswith(_DERIVED):
            return True
        if name == "lm_head.weight":
            return self.spec.tie_embeddings
        # DeepSeek-V3 stores its layers of multi-token prediction after the decoder layers
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return (
            self.family == "deepseek_v3" and layer is not None and int(layer[1]) >= self.spec.layers
        )


def refuse_pickles(paths: list[Path], where: str) -> None:
    """Raises WeightsError when there are pickle files among the paths."""
    pickles = sorted(path.name for path in paths if path.suffix in PICKLES)
    if pickles:
        message = f"{pickles[0]} is a pickle file, and reading one runs code"
        raise WeightsError(
            f"{where}: {message}; convert it to safetensors if you trust it, and give that"
        )


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor by name."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, Mapping) or not all(_plain(name) for name in listed.values()):
            raise WeightsError(
                f"{folder / INDEX} has no weight_map of file names in this folder; save it again"
            )
        files = {name: folder / str(file) for name, file in listed.items()}
        for path in set(files.values()):
            _check_listed(path, {name for name, file in files.items() if file == path})
        return files
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    refuse_pickles(list(folder.iterdir()), str(folder))
    raise WeightsError(
        f"{folder} contains no {SINGLE} and no {INDEX}; give a folder as transformers saves it"
    )


def _plain(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")


def _check_listed(path: Path, names: set[str]) -> None:
    absent = sorted(names - set(_names(path)))
    if absent:
        raise WeightsError(
            f"{path} does not contain {absent[0]}, which the index lists; fetch the folder again"
        )


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from None


def _broken(path: Path, error: Exception) -> WeightsError:
    if not path.exists():
        return WeightsError(f"{path} is missing, and the index lists it; fetch the folder again")
    return WeightsError(
        f"{path} is not a complete safetensors file ({str(error)[:120]}); fetch it again"
    )
