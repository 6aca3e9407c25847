"""Folders of adapters that no one trained, over untrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workers.contracts.catalog.adapter_shapes import adapter_shapes
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.models.adapters.peft_files import fingerprint, write_adapter
from workers.models.weights.open import open_weights


def adapter_folder(
    folder: Path, base: Path, *, seed: int = 0, std: float = 0.5, **options: Any
) -> Path:
    """An adapter with random factors; `options` are of AdapterSpec."""
    folder.mkdir(parents=True)
    weights, adapter = open_weights(base), AdapterSpec(**options)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * std
        for name, shape in adapter_shapes(weights.spec, adapter).items()
    }
    write_adapter(
        folder,
        tensors,
        adapter=adapter,
        model=weights.spec,
        base=str(base),
        fingerprint=fingerprint(weights),
    )
    return folder
