"""A GGUF file as weights: Llama, Mistral, Mixtral, Qwen2 and Qwen3 in any known quantization.

Tensors are dequantized to fp32 from the mapped file by the package `gguf`. `tokenizer` reads the
file's tokenizer. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from workers.contracts.base import validation_problems
from workers.contracts.specs.model import ModelSpec, Rope, RopeScaling
from workers.models.errors import WeightsError
from workers.models.gguf.header import StoredTensor, read_gguf_header
from workers.models.layers.rope_scaling import scaled_frequencies
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import checked

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "blocks": "blk",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
# of Llama 3.1 and 3.2, whose files contain the frequencies instead of the factor
_LLAMA3_FACTORS = (8.0, 32.0)


class GgufFile:
    """Weights of one of ARCHITECTURES.

    Raises WeightsError for incomplete files and other architectures.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._gguf = _package(path)
        header = read_gguf_header(path)
        self._values, self._tensors = header.values, header.tensors
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        for tensor in self._tensors.values():
            self._extent(tensor)
        self.spec = self._spec(path.stem)
        self._shapes = weight_shapes(self.spec)
        self._check_names()

    def read(self, name: str) -> Tensor:
        """The tensor `name` in fp32. Raises WeightsError."""
        stored = self._tensors[_gguf_name(name)]
        tensor = self._numbers(stored)
        if self._values["general.architecture"] == "llama" and ".attn.q." in name:
            tensor = _halves(tensor, self.spec.heads)
        elif self._values["general.architecture"] == "llama" and ".attn.k." in name:
            tensor = _halves(tensor, self.spec.kv_heads)
        return checked(tensor, name, self._shapes[name], self.where)

    def _numbers(self, stored: StoredTensor) -> Tensor:
        row_bytes, end = self._extent(stored)
        kind = self._gguf.GGMLQuantizationType(stored.kind)
        raw = self._bytes[stored.start : end].reshape(*stored.shape[:-1], row_bytes)
        try:
            values = self._gguf.dequantize(np.ascontiguousarray(raw), kind)
        except NotImplementedError:
            message = f"{stored.name} is quantized as {kind.name}, which gguf cannot dequantize"
            raise WeightsError(
                f"{self.where}: {message}; give the file in another quantization"
            ) from None
        return torch.from_numpy(np.array(values, dtype=np.float32).reshape(stored.shape))

    def _extent(self, stored: StoredTensor) -> tuple[int, int]:
        """Bytes per row, and the end of the tensor in the file."""
        try:
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(stored.kind)]
        except (ValueError, KeyError):
            message = (
                f"{stored.name} is of kind {stored.kind}, which the package gguf does not know"
            )
            raise WeightsError(f"{self.where}: {message}. Use a newer package gguf.") from None
        if not stored.shape or stored.shape[-1] % block:
            raise WeightsError(
                f"{self.where}: {stored.name} has shape {list(stored.shape)}; fetch the file again"
            )
        row_bytes = stored.shape[-1] // block * size
        end = stored.start + row_bytes * math.prod(stored.shape[:-1])
        if end > len(self._bytes):
            message = f"{stored.name} ends at byte {end:,}, the file at {len(self._bytes):,}"
            raise WeightsError(
                f"{self.where} is not a complete GGUF file ({message}); fetch it again"
            )
        return row_bytes, end

    def _spec(self, stem: str) -> ModelSpec:
        kind = self._values.get("general.architecture")
        if kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise WeightsError(
                f"{self.where}: its architecture is {kind!r}; those that can be read are {known}"
            )
        heads = self._integer("attention.head_count")
        shape: dict[str, Any] = {
            "name": str(self._values.get("general.name") or stem)[:120],
            "layers": self._integer("block_count"),
            "hidden": self._integer("embedding_length"),
            "heads": heads,
            "kv_heads": self._integer("attention.head_count_kv", heads),
            "ffn": self._integer("feed_forward_length"),
            "vocab": self._vocab(),
            "max_seq_len": self._integer("context_length"),
            "norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon")),
            "tie_embeddings": "output.weight" not in self._tensors,
            "qk_norm": kind in ("qwen3", "qwen3moe"),
            "bias": "qkv" if kind == "qwen2" else "none",
            "window": self._values.get(f"{kind}.attention.sliding_window"),
        }
        if f"{kind}.attention.key_length" in self._values:
            shape["head_dim"] = self._integer("attention.key_length")
        if f"{kind}.expert_count" in self._values:
            width = self._integer("expert_feed_forward_length", shape["ffn"])
            used = self._integer("expert_used_count")
            shape["moe"] = {
                "experts": self._integer("expert_count"),
                "top_k": used,
                "expert_ffn": width,
            }
        head_dim = shape.get("head_dim") or shape["hidden"] // heads
        shape["rope"] = self._rope(head_dim)
        try:
            return ModelSpec.from_dict(shape)
        except ValidationError as error:
            raise WeightsError(
                f"{self.where}: " + "; ".join(str(item) for item in validation_problems(error))
            ) from None

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = _shortest(self._number("rope.freq_base", 10000.0))
        rotated = self._integer("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise WeightsError(
                f"{self.where}: {rotated} of {head_dim} dims of a head are rotated; only all can "
                "be read"
            )
        if "rope_freqs.weight" in self._tensors:
            return {"theta": theta, "scaling": self._llama3(theta, head_dim)}
        kind = self._text("rope.scaling.type", "none")
        if kind == "none":
            return {"theta": theta}
        if kind not in ("linear", "yarn"):
            raise WeightsError(
                f"{self.where}: rope.scaling.type is {kind!r}; none, linear or yarn can be read"
            )
        scaling: dict[str, Any] = {"name": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_seq_len"] = self._integer("rope.scaling.original_context_length")
        return {"theta": theta, "scaling": scaling}

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        frequencies = self._numbers(self._tensors["rope_freqs.weight"]).float()
        plain = scaled_frequencies(Rope(theta=theta), head_dim, length=1, max_seq_len=1)
        for factor in _LLAMA3_FACTORS:
            scaling = RopeScaling(name="llama3", factor=factor, original_max_seq_len=8192)
            scaled = scaled_frequencies(
                Rope(theta=theta, scaling=scaling), head_dim, length=1, max_seq_len=1
            )
            if frequencies.shape == plain.shape and torch.allclose(
                plain / frequencies, scaled, rtol=1e-4
            ):
                return scaling.to_dict()
        raise WeightsError(
            f"{self.where}: rope_freqs are not those of Llama 3.1 or 3.2; give the safetensors "
            "folder"
        )

    def _vocab(self) -> int:
        table = self._tensors.get("token_embd.weight")
        if table is None:
            raise WeightsError(f"{self.where} does not contain token_embd.weight; fetch it again")
        return table.shape[0]

    def _check_names(self) -> None:
        expected = {_gguf_name(name) for name in self._shapes}
        missing = sorted(expected - self._tensors.keys())
        if missing:
            raise WeightsError(
                f"{self.where} does not contain {missing[0]}; fetch it again, or give a newer "
                "conversion"
            )
        foreign = sorted(self._tensors.keys() - expected - {"rope_freqs.weight"})
        if foreign:
            raise WeightsError(
                f"{self.where}: {foreign[0]} belongs to no model that can be read; give another "
                "file"
            )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WeightsError(
                f"{self.where}: {key} is {value!r}; one integer for all layers can be read"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{self.where}: {key} is {value!r}; a number is required")
        return float(value)

    def _text(self, key: str, default: str) -> str:
        return str(self._value(key, default))

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(f"{self._values['general.architecture']}.{key}", default)
        if value is None:
            raise WeightsError(f"{self.where}: {key} is missing; fetch the file again")
        return value


def _package(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise WeightsError(
            f"reading {path} needs the package gguf; install it, or give a Hugging Face folder"
        ) from None
    return gguf


def _gguf_name(name: str) -> str:
    """`blocks.3.attn.q.weight` → `blk.3.attn_q.weight`."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return ".".join([_NAMES["blocks"], parts[1], _NAMES[".".join(parts[2:-1])], parts[-1]])
    return f"{_NAMES[parts[0]]}.{parts[-1]}"


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from interleaved pairs (llama.cpp) to halves (ours, Hugging Face)."""
    rows, rest = tensor.shape[0], tensor.shape[1:]
    return tensor.reshape(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


def _shortest(value: float) -> float:
    """The shortest decimal of a number stored in fp32: 1e-5, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
