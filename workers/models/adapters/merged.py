"""A base model and its adapter as one set of weights, and the error of rounding them.

Merges tensor by tensor while they are read. Does not depend on file formats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.contracts.base import Contract
from workers.contracts.catalog.adapter_shapes import block_linears, with_biases
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.nf4 import quantize_nf4
from workers.models.adapters.peft_config import SCORES, read_config
from workers.models.adapters.peft_files import (
    AdapterWeights,
    check_base,
    fingerprint,
    read_adapter,
)
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.weights.parameter_shapes import weight_shapes
from workers.models.weights.reader import Weights, fill_model

_MOST_CHECKED = 2_000_000_000  # parameters: two such models in fp32 take 16 GB


class MergeError(Contract):
    """What rounding merged weights to their stored type changes.

    `relative` is the rounding's norm over that of the adapter's change; `logits` the largest
    difference of a logit.
    """

    relative: float
    logits: float | None = None


class MergedWeights:
    """`Weights` with the adapter's change; raises WeightsError for one that weights cannot hold."""

    def __init__(
        self, base: Weights, adapter: AdapterWeights, spec: ModelSpec | None = None
    ) -> None:
        """`spec`: the merged model, if it has another head than the base."""
        if not adapter.mergeable:
            raise WeightsError(
                f"{adapter.where} ({adapter.kind}) computes next to the model's weights and cannot "
                "be merged into them"
            )
        check_base(adapter, base)
        self.base, self.adapter, self.where = base, adapter, adapter.where
        self.spec = spec or base.spec
        if adapter.kind == "ORRERY-BITFIT":
            self.spec = with_biases(self.spec)
        self._added = 0.0
        self._lost = 0.0

    def read(self, name: str) -> Tensor:
        """The merged tensor in the base's type; see `Weights`."""
        if name in self.adapter.tensors and not self.in_base(name):
            return self.adapter.tensors[name]
        stored = self.base.read(name)
        exact = self.exact(name, stored)
        if exact is None:
            return stored
        rounded = exact.to(stored.dtype)
        self._added += float((exact - self._frozen(name, stored)).double().square().sum())
        self._lost += float((rounded.float() - exact).double().square().sum())
        return rounded

    def exact(self, name: str, stored: Tensor) -> Tensor | None:
        """The merged tensor in fp32; None if the adapter leaves the stored one as it is."""
        adapter = self.adapter
        module, _, leaf = name.rpartition(".")
        update, factor = adapter.low_rank.get(module), adapter.scaled.get(module)
        frozen = self._frozen(name, stored)
        if leaf == "weight" and update is not None:
            merged = frozen + update.scale * (update.b.float() @ update.a.float())
            if update.magnitude is not None:
                rows = update.magnitude.float() / merged.norm(dim=1)
                merged = merged * rows[:, None]
            return merged
        if factor is not None and leaf == "weight":
            return frozen * factor.float()
        if factor is not None and leaf == "bias" and factor.shape[1] == 1:
            return frozen * factor.float()[:, 0]
        unchanged = frozen is stored and name not in adapter.tensors
        return None if unchanged else frozen

    def error(self) -> MergeError:
        """Of the tensors that were read so far; of logits for models that fit a check on the host.

        Logits are those of a fixed sequence, in fp32: of the exact sums and of the rounded ones.
        """
        relative = (self._lost / self._added) ** 0.5 if self._added else 0.0
        if parameter_count(self.spec).total > _MOST_CHECKED:
            return MergeError(relative=relative)
        exact = _logits(_Exact(self))
        return MergeError(relative=relative, logits=float((_logits(self) - exact).abs().max()))

    def describe(self) -> dict[str, Any]:
        """Where the merged weights come from."""
        adapter = self.adapter
        return {
            "adapter": adapter.where,
            "peft_type": adapter.kind,
            "base": self.base.where,
            "base_fingerprint": fingerprint(self.base),
            "base_was_quantized": adapter.quantized,
        }

    def _frozen(self, name: str, stored: Tensor) -> Tensor:
        """What the adapter was trained next to: dequantized if the base was stored in 4 bits."""
        if name in self.adapter.tensors:
            return self.adapter.tensors[name].float()
        quantized = self.adapter.quantized
        if quantized is None or not self._is_quantized(name):
            return stored if stored.dtype == torch.float32 else stored.float()
        return quantize_nf4(stored, double=quantized.endswith("double")).dequantize(torch.float32)

    def _is_quantized(self, name: str) -> bool:
        if not name.startswith("blocks.") or not name.endswith(".weight"):
            return False
        _, layer, module = name.removesuffix(".weight").split(".", 2)
        return module in block_linears(self.spec, int(layer))

    def in_base(self, name: str) -> bool:
        """Whether the base has a tensor of that name."""
        return name in weight_shapes(self.base.spec)


class _Exact:
    """Merged weights in fp32, not rounded to the base's type."""

    def __init__(self, merged: MergedWeights) -> None:
        self.merged, self.spec, self.where = merged, merged.spec, merged.where

    def read(self, name: str) -> Tensor:
        """See `Weights`."""
        merged = self.merged
        if name in merged.adapter.tensors and not merged.in_base(name):
            return merged.adapter.tensors[name].float()
        stored = merged.base.read(name)
        exact = merged.exact(name, stored)
        return stored.float() if exact is None else exact


@torch.no_grad()
def _logits(weights: Weights) -> Tensor:
    decoder = Decoder(weights.spec).eval()
    fill_model(decoder, weights)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(weights.spec.vocab, (1, 32), generator=generator)
    logits: Tensor = decoder(tokens[:, : weights.spec.max_seq_len])
    return logits


def open_adapter(folder: Path, open_base: Callable[[Path], Weights]) -> MergedWeights:
    """The merged weights of an adapter's folder, over the base that it names.

    Raises WeightsError.
    """
    config = read_config(folder)
    name = config.get("base_model_name_or_path") or ""
    if not name or not Path(name).exists():
        raise WeightsError(
            f"{folder} is an adapter over {name or 'an unnamed base'}, which is not on this "
            "machine; fetch the base to that path"
        )
    base = open_base(Path(name))
    spec = base.spec.with_scalar_head() if config.get("task_type") == SCORES else base.spec
    return MergedWeights(base, read_adapter(folder, spec), spec)
