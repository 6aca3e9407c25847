"""Weights of small models that no one trained, and a folder of them as Hugging Face lays it out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.hf.saving import save_hugging_face

BYTES = {
    "name": "bytes",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 256,
    "max_seq_len": 96,
}


class Untrained:
    """The same ones each time."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.where = spec, "memory"
        torch.manual_seed(4)
        self._tensors = {
            name: torch.randn_like(tensor) * 0.3
            for name, tensor in Decoder(spec).named_parameters()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def untrained_folder(folder: Path, shape: dict[str, object] = BYTES) -> Path:
    save_hugging_face(Untrained(ModelSpec.from_dict(shape)), folder)
    return folder
