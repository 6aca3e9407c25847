"""Adapters of our own with drawn values: the modules that compute them, and the files we write.

Needs no PEFT: `golden` has PEFT load the same files and stores its logits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.workers.models.adapters.golden import TOKENS
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.models.adapters.apply import apply_adapter, trained_names
from workers.models.adapters.peft_files import write_adapter
from workers.models.decoder import Decoder
from workers.models.weights.reader import Weights, fill_model

ADAPTERS = {
    "lora": AdapterSpec(method="lora", rank=2),
    "rslora": AdapterSpec(method="rslora", rank=2, alpha=3, targets=["q", "down"]),
    "saved": AdapterSpec(method="lora", rank=2, targets=["v"], modules_to_save=["head"]),
    "dora": AdapterSpec(method="dora", rank=2, alpha=5),
    "ia3": AdapterSpec(method="ia3"),
    "prompt": AdapterSpec(method="prompt", rank=3),
    "p_tuning": AdapterSpec(method="p_tuning", rank=3),
    "prefix": AdapterSpec(method="prefix", rank=3),
    "p_tuning_v2": AdapterSpec(method="p_tuning_v2", rank=2),
}


def adapted_decoder(name: str, base: Weights) -> Decoder:
    """The base with the adapter, whose parameters look trained."""
    adapter, decoder = ADAPTERS[name], Decoder(base.spec).eval()
    apply_adapter(decoder, adapter)
    fill_model(decoder, base)
    generator = torch.Generator().manual_seed(7)
    for key, parameter in sorted(decoder.named_parameters()):
        if key not in trained_names(decoder, adapter):
            continue
        drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
        leaf = key.rpartition(".")[2]
        if leaf == "lora_magnitude" or key == "head.weight":
            parameter.data.mul_(1 + drawn)
        else:
            parameter.data.copy_(1 + drawn if leaf == "ia3_l" else drawn)
    return decoder


@torch.no_grad()
def live_logits(decoder: Decoder) -> Tensor:
    """`[S, 8]`: of the first ids of the vocabulary, computed next to the base's weights."""
    return decoder(torch.tensor(TOKENS))[0, :, :8]


def write(name: str, decoder: Decoder, folder: Path, base: Weights) -> None:
    """Write the adapter's two files as a checkpoint does."""
    adapter = ADAPTERS[name]
    names = trained_names(decoder, adapter)
    tensors = {key: each for key, each in decoder.named_parameters() if key in names}
    folder.mkdir(parents=True, exist_ok=True)
    where = {"model": base.spec, "base": "base", "fingerprint": None}
    write_adapter(folder, tensors, adapter=adapter, **where)
