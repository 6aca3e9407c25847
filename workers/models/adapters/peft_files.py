"""PEFT's two files of an adapter: written from its tensors, read and checked against a model.

Names in the files are Hugging Face's. Does not depend on modules, training or merging.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.fused_projections import join
from workers.models.adapters.peft_config import (
    CONFIG,
    TENSORS,
    pattern_value,
    peft_config,
    read_config,
)
from workers.models.adapters.prompt import encoded
from workers.models.errors import WeightsError
from workers.models.hf.names import Entry, tensor_entries
from workers.models.hf.writing import family_for
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import Weights

_ROOT = "base_model.model."
_LOW_RANK = ("lora_A", "lora_B")
_ADAPTED = (*_LOW_RANK, "lora_magnitude", "ia3_l")
# endings of PEFT's names; those of an embedding have the factors of its transposed weight
_SUFFIXES = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_magnitude_vector": "lora_magnitude_vector",
    ".ia3_l": "ia3_l",
    ".lora_embedding_A": "lora_embedding_A",
    ".lora_embedding_B": "lora_embedding_B",
}
_OWN = "orrery"  # key of our metadata in the tensors' file


@dataclass(frozen=True, slots=True)
class LowRank:
    """W + scale · B A, or with `magnitude` DoRA's rows of that norm."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's tensors by our names of modules, without the model's own.

    `scaled`: IA3's factors by module; `tensors`: parameters in full by name (saved modules,
    biases, bottlenecks); `prompt`: PEFT's prompt_embeddings. `quantized`: the 4-bit storage that
    the base had, "nf4" or "nf4 double".
    """

    kind: str
    where: str
    low_rank: dict[str, LowRank] = field(default_factory=dict)
    scaled: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    prompt: Tensor | None = None
    base: str = ""
    fingerprint: str | None = None
    quantized: str | None = None
    spec: AdapterSpec | None = None

    @property
    def mergeable(self) -> bool:
        """Whether the model's own weights can hold what the adapter changes."""
        return self.prompt is None and self.kind != "ORRERY-BOTTLENECK"


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter's files."""
    return (folder / CONFIG).is_file() and (folder / TENSORS).is_file()


def fingerprint(weights: Weights) -> str:
    """A digest of a base model: all names and shapes, and the values of two tensors."""
    digest = hashlib.sha256(repr(sorted(weight_shapes(weights.spec).items())).encode())
    for name in ("blocks.0.attn.o.weight", "norm.weight"):
        digest.update(weights.read(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    adapter: AdapterSpec,
    model: ModelSpec,
    base: str,
    fingerprint: str | None,
) -> None:
    """Write both files into an existing folder; `tensors` are full, by our parameter names."""
    names = _Names(model)
    modules: dict[str, list[str]] = {}
    written: dict[str, Tensor] = {}
    joined: dict[str, dict[str, dict[str, Tensor]]] = {}  # by their module and our part of it
    prompt = _prompt(tensors, adapter, model)
    if prompt is not None:
        written["prompt_embeddings"] = prompt
        tensors = {name: each for name, each in tensors.items() if name in names.ours}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        full = tensor.detach().cpu().contiguous()
        if leaf in _ADAPTED and path in names.joined_of:
            joined.setdefault(names.joined_of[path], {}).setdefault(path, {})[leaf] = full
        elif leaf in _ADAPTED:
            module = names.module(path)
            modules.setdefault(leaf, []).append(module)
            if leaf == "ia3_l":
                full = full[None] if path.endswith(".down") else full[:, None]
            written[_file_name(module, leaf)] = full
        else:
            theirs = names.tensor(name)
            written[f"{_ROOT}{theirs}" if theirs else name] = full
    for module, parts in joined.items():
        ours = names.parts_of[module]
        widths = [names.shapes[f"{each}.weight"][0] for each in ours]
        for leaf, tensor in join([parts.get(each) for each in ours], widths, module).items():
            modules.setdefault(leaf, []).append(module)
            full = tensor[:, None] if leaf == "ia3_l" else tensor
            written[_file_name(module, leaf)] = full.contiguous()
    config = peft_config(adapter, model, base=base, modules=modules)
    config |= _joined_ranks(config, joined)
    own = {"adapter": adapter.to_dict(), "fingerprint": fingerprint}
    save_file(written, folder / TENSORS, metadata={"format": "pt", _OWN: json.dumps(own)})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path, model: ModelSpec) -> AdapterWeights:
    """The adapter of a folder for a model of that shape; every name, shape and number is checked.

    Raises WeightsError.
    """
    config = read_config(folder)
    tensors, own = _load(folder / TENSORS)
    spec = AdapterSpec.from_dict(own["adapter"]) if own.get("adapter") else None
    quantized = None
    if spec is not None and spec.storage is not None:
        quantized = "nf4 double" if spec.double_quantized else "nf4"
    adapter = AdapterWeights(
        config["peft_type"],
        str(folder),
        base=config.get("base_model_name_or_path") or "",
        fingerprint=own.get("fingerprint"),
        quantized=quantized,
        spec=spec,
        prompt=tensors.pop("prompt_embeddings", None),
    )
    if adapter.prompt is not None:
        _check_prompt(adapter, config, model)
    _Reading(adapter, config, model).take(tensors)
    return adapter


def check_base(adapter: AdapterWeights, base: Weights) -> None:
    """Raises WeightsError if the adapter was trained over other weights than `base`."""
    if adapter.fingerprint is not None and adapter.fingerprint != fingerprint(base):
        raise WeightsError(
            f"{adapter.where} was trained over {adapter.base}, the weights of {base.where} differ; "
            "give the adapter's own base"
        )


class _Reading:
    """Assigns the tensors of a file to the modules of a model."""

    def __init__(self, adapter: AdapterWeights, config: dict[str, Any], model: ModelSpec) -> None:
        self.adapter, self.config, self.model = adapter, config, model
        self.names = _Names(model)
        self.shapes = weight_shapes(model)

    def take(self, tensors: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            short = name.removeprefix(_ROOT)
            for suffix, part in _SUFFIXES.items():
                if short.endswith(suffix):
                    parts.setdefault(short.removesuffix(suffix), {})[part] = tensor
                    break
            else:
                self._full(name, short, tensor)
        for module, present in parts.items():
            self._module(module, present)

    def _full(self, name: str, short: str, tensor: Tensor) -> None:
        ours = self.names.ours_of.get(
            short.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        )
        if ours is None and self.adapter.kind.startswith("ORRERY-"):
            ours = short  # a parameter that only the adapter has
        elif ours is not None and tuple(tensor.shape) != self.shapes[ours]:
            raise self._error(name, tensor, self.shapes[ours])
        if ours is None:
            raise WeightsError(
                f"{self.adapter.where} has {name}, which {self.model.name} has no place for; give "
                "the adapter's own base"
            )
        self.adapter.tensors[ours] = tensor

    def _module(self, module: str, present: dict[str, Tensor]) -> None:
        if module in self.names.parts_of:
            self._parts(module, present)
            return
        ours = self.names.modules_of.get(module)
        if ours is None:
            raise WeightsError(
                f"{self.adapter.where} adapts {module}, which {self.model.name} does not have as "
                "one linear layer; give the adapter's own base"
            )
        self._assign(ours, module, present, self.shapes[f"{ours}.weight"])

    def _parts(self, module: str, present: dict[str, Tensor]) -> None:
        """The tensors of a joined layer: each of our layers has its own outputs."""
        ours = self.names.parts_of[module]
        widths = [self.shapes[f"{each}.weight"][0] for each in ours]
        self._assign("", module, present, (sum(widths), self.shapes[f"{ours[0]}.weight"][1]))
        whole, factor = self.adapter.low_rank.pop("", None), self.adapter.scaled.pop("", None)
        if factor is not None:
            for name, part in zip(ours, torch.split(factor, widths), strict=True):
                self.adapter.scaled[name] = part
        if whole is not None:
            magnitudes: list[Tensor | None] = [None] * len(ours)
            if whole.magnitude is not None:
                magnitudes = list(torch.split(whole.magnitude, widths))
            rows = torch.split(whole.b, widths)
            for name, each, magnitude in zip(ours, rows, magnitudes, strict=True):
                self.adapter.low_rank[name] = LowRank(whole.a, each, whole.scale, magnitude)

    def _assign(
        self, ours: str, module: str, present: dict[str, Tensor], shape: tuple[int, ...]
    ) -> None:
        outputs, inputs = shape
        if "ia3_l" in present:
            factor = present["ia3_l"]
            if tuple(factor.shape) not in ((outputs, 1), (1, inputs)):
                raise self._error(f"{module}.ia3_l", factor, (outputs, 1))
            self.adapter.scaled[ours] = factor
            return
        if "lora_embedding_A" in present and "lora_embedding_B" in present:
            if self.model.tie_embeddings:
                raise WeightsError(
                    f"{self.adapter.where} adapts {module} only, which shares its weight with the "
                    "head; adapt other layers, or give a base whose head is its own"
                )
            a, b = present["lora_embedding_B"].T, present["lora_embedding_A"].T
            present = {**present, "lora_A": a, "lora_B": b}
        missing = [name for name in _LOW_RANK if name not in present]
        if missing:
            raise WeightsError(f"{self.adapter.where} has no {module}.{missing[0]}.weight")
        a, b = present["lora_A"], present["lora_B"]
        rank = int(pattern_value(self.config.get("rank_pattern"), module, self.config["r"]))
        for name, tensor, needed in (("lora_A", a, (rank, inputs)), ("lora_B", b, (outputs, rank))):
            if tuple(tensor.shape) != needed:
                raise self._error(f"{module}.{name}", tensor, needed)
        magnitude = present.get("lora_magnitude_vector")
        if magnitude is not None and magnitude.numel() != outputs:
            raise self._error(f"{module}.lora_magnitude_vector", magnitude, (outputs,))
        if bool(self.config.get("use_dora")) != (magnitude is not None):
            raise WeightsError(f"{self.adapter.where}: {module} and use_dora disagree")
        alpha = float(
            pattern_value(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        )
        scale = alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
        flat = None if magnitude is None else magnitude.flatten()
        self.adapter.low_rank[ours] = LowRank(a, b, scale, flat)

    def _error(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> WeightsError:
        return WeightsError(
            f"{self.adapter.where}: {name} has shape {list(tensor.shape)}, {self.model.name} needs "
            f"{list(shape)}; give the adapter's own base"
        )


class _Names:
    """Our names of a model's modules and tensors, and Hugging Face's."""

    def __init__(self, model: ModelSpec) -> None:
        self.shapes = weight_shapes(model)
        try:
            entries = tensor_entries(model, family_for(model))
        except WeightsError:  # no other program has this model: our own names
            entries = [Entry((name,), (name,)) for name in self.shapes]
        joined = [each for each in entries if len(each.ours) > 1 and len(each.theirs) == 1]
        self.parts_of = {
            each.theirs[0].removesuffix(".weight"): tuple(
                name.removesuffix(".weight") for name in each.ours
            )
            for each in joined
            if each.theirs[0].endswith(".weight")
        }
        self.joined_of = {ours: theirs for theirs, parts in self.parts_of.items() for ours in parts}
        single = [each for each in entries if len(each.ours) == len(each.theirs) == 1]
        self.theirs_of = {each.ours[0]: each.theirs[0] for each in single}
        self.ours_of = {theirs: ours for ours, theirs in self.theirs_of.items()}
        self.ours = frozenset(self.shapes)
        weights = {o: t for o, t in self.theirs_of.items() if o.endswith(".weight")}
        self.modules_of = {
            theirs.removesuffix(".weight"): ours.removesuffix(".weight")
            for ours, theirs in weights.items()
        }

    def module(self, ours: str) -> str:
        """Hugging Face's name of a linear layer that is one of theirs too."""
        return self.theirs_of[f"{ours}.weight"].removesuffix(".weight")

    def tensor(self, ours: str) -> str | None:
        """Hugging Face's name of a parameter; None if the model itself has none."""
        return self.theirs_of.get(ours)


def _file_name(module: str, leaf: str) -> str:
    """The name in the file of a tensor of Hugging Face's `module`."""
    names = {"lora_magnitude": "lora_magnitude_vector", "ia3_l": "ia3_l"}
    return f"{_ROOT}{module}.{names.get(leaf, f'{leaf}.weight')}"


def _joined_ranks(
    config: dict[str, Any], joined: Mapping[str, Mapping[str, Mapping[str, Tensor]]]
) -> dict[str, Any]:
    """PEFT's patterns that give joined layers a rank of their own and the same scale."""
    ranks, alphas = {}, {}
    for module, parts in joined.items():
        rank = sum(len(each["lora_A"]) for each in parts.values() if "lora_A" in each)
        if rank and rank != config["r"]:
            share = rank / config["r"]
            ranks[module] = rank
            alphas[module] = config["lora_alpha"] * (share**0.5 if config["use_rslora"] else share)
    return {"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {}


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = json.loads(metadata.get(_OWN, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{path}: {name} has numbers that are not finite")
    return tensors, own


def _prompt(tensors: Mapping[str, Tensor], adapter: AdapterSpec, model: ModelSpec) -> Tensor | None:
    """PEFT's prompt_embeddings: of prompt methods `[n, hidden]`, with P-tuning's encoder applied;
    of prefix methods `[n, layers · 2 · key width]`.
    """
    if adapter.method in ("prompt", "p_tuning"):
        return encoded(tensors)
    if adapter.method in ("prefix", "p_tuning_v2"):
        parts = [
            tensors[f"blocks.{layer}.attn.prefix_{kind}"].cpu().T
            for layer in range(model.layers)
            for kind in "kv"
        ]
        return torch.cat(parts, dim=1).contiguous()
    return None


def _check_prompt(adapter: AdapterWeights, config: dict[str, Any], model: ModelSpec) -> None:
    assert adapter.prompt is not None
    prefix = config["peft_type"] == "PREFIX_TUNING"
    width = model.layers * 2 * model.kv_heads * model.head_dim if prefix else model.hidden
    shape = (int(config["num_virtual_tokens"]), width)
    if tuple(adapter.prompt.shape) != shape:
        raise WeightsError(
            f"{adapter.where}: prompt_embeddings has shape {list(adapter.prompt.shape)}, "
            f"{model.name} needs {list(shape)}; give the adapter's own base"
        )
