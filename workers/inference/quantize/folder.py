"""Writes a compressed model as a folder that transformers reads: tensors, config, tokenizer.

Does not depend on how weights were compressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from workers.contracts.specs.model import ModelSpec
from workers.inference.quantize.methods import CompressedModel
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.hf.names import tensor_entries
from workers.models.hf.quantized_formats import Quantization, pack, read_quantization
from workers.models.hf.saving import save_hugging_face
from workers.models.hf.writing import family_for
from workers.models.text.assets import write_files
from workers.models.weights.parameter_shapes import named_weights

REPORT = "report.json"


class InMemory:
    """A decoder's own tensors as weights."""

    def __init__(self, decoder: Decoder) -> None:
        self.spec: ModelSpec = decoder.spec
        self.where = "memory"
        self._tensors = named_weights(decoder)

    def read(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._tensors[name].detach()


def quantization_config(method: str, group: int) -> dict[str, Any] | None:
    """`quantization_config` of the folder; None for unquantized weights."""
    excluded = ["lm_head"]
    if method in ("awq", "int4"):
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": excluded,
        }
    if method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq",
            "lm_head": False,
        }
    if method in ("int8", "smoothquant"):
        weights = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        }
        tokens = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        inputs = tokens if method == "smoothquant" else None
        scheme = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": "int-quantized" if inputs else "pack-quantized",
            "ignore": excluded,
            "config_groups": {"group_0": scheme},
        }
    if method == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": excluded,
        }
    return {"quant_method": "low-rank"} if method == "lowrank" else None


def check_family(spec: ModelSpec, method: str) -> None:
    """Raises WeightsError if no published format stores such a model by this method."""
    family = family_for(spec)
    if family == "gpt2" and method != "prune":
        raise WeightsError(
            f"{spec.name}: GPT-2 stores queries, keys and values in one transposed matrix, for "
            "which no quantized format is supported; quantize it on load, by `quantize`"
        )


def write_folder(
    decoder: Decoder,
    compressed: CompressedModel,
    folder: Path,
    *,
    method: str,
    group: int,
    assets: Mapping[str, bytes],
) -> None:
    """Write into an existing, empty folder. Raises WeightsError, OSError."""
    config = quantization_config(method, group)
    scheme = read_quantization({"quantization_config": config}, str(folder))
    packed: dict[str, dict[str, Tensor]] = {}
    if scheme is not None:
        for entry in tensor_entries(decoder.spec, family_for(decoder.spec)):
            if entry.ours[0] in compressed.packed:
                weights = compressed.packed[entry.ours[0]]
                for theirs, weight in zip(entry.theirs, weights, strict=True):
                    packed[theirs] = _parts(scheme, theirs, weight)
    more = {} if config is None else {"quantization_config": config}
    save_hugging_face(InMemory(decoder), folder, packed=packed, more=more)
    write_files(assets, folder)


def _parts(scheme: Quantization, theirs: str, weight: Any) -> dict[str, Tensor]:
    prefix = theirs.removesuffix(".weight")
    try:
        return {
            name: part.contiguous()
            for name, part in zip(scheme.parts(prefix), pack(scheme, weight), strict=True)
        }
    except ValueError as error:
        raise WeightsError(f"{theirs}: {error}") from None
