"""Adds an adapter's modules to a decoder, and freezes what is not trained.

Works on meta-built decoders, before they are sharded. Does not depend on plans or files.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from workers.contracts.catalog.adapter_shapes import (
    adapter_layer_shapes,
    adapter_shapes,
    trained_base_names,
)
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.models.adapters.bottleneck import Bottleneck
from workers.models.adapters.linear import AdaptedLinear, adapted
from workers.models.adapters.prompt import Prompt
from workers.models.decoder import Block, Decoder


def apply_adapter(decoder: Decoder, adapter: AdapterSpec) -> None:
    """Add the adapter's parameters to the decoder's part of the model; values are not set."""
    spec = decoder.spec
    for layer, block in decoder.blocks.items():
        assert isinstance(block, Block)
        if adapter.storage is not None:
            for name, module in list(block.named_modules()):
                if isinstance(module, nn.Linear):
                    _replace(block, name, adapter)
        if adapter.method == "adapter":
            with torch.device(next(block.parameters()).device):
                block.attn_adapter = Bottleneck(spec.hidden, adapter.size)
                block.mlp_adapter = Bottleneck(spec.hidden, adapter.size)
            continue
        for name, shape in adapter_layer_shapes(spec, adapter, int(layer)).items():
            owner, _, leaf = name.rpartition(".")
            _add(block, owner, leaf, shape, adapter)
    if adapter.method in ("prefix", "p_tuning_v2"):
        decoder.prefixed = adapter.size
    if adapter.method in ("prompt", "p_tuning") and decoder.part.first:
        with torch.device(next(decoder.parameters()).device):
            decoder.prompt = Prompt(adapter, spec.hidden)
    last = adapter_shapes(spec, adapter).get("norm.bias")
    if last is not None and decoder.norm is not None:
        _add(decoder, "norm", "bias", last, adapter)


def trained_names(decoder: Decoder, adapter: AdapterSpec) -> set[str]:
    """The parameters of an adapted decoder that are trained."""
    base = trained_base_names(decoder.spec, adapter)
    added = adapter_shapes(decoder.spec, adapter)
    return {name for name, _ in decoder.named_parameters() if name in base or name in added}


def freeze(decoder: Decoder, trained: Collection[str], dtype: torch.dtype) -> None:
    """Take the gradient from every parameter that is not in `trained` and store it in `dtype`."""
    for path, module in decoder.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            name = f"{path}.{leaf}" if path else leaf
            if parameter is not None and name not in trained:
                stored = parameter.detach().to(dtype)
                module._parameters[leaf] = nn.Parameter(stored, requires_grad=False)


def quantize_frozen(decoder: Decoder) -> None:
    """Store the weights of adapted linear layers in 4 bits; values are set by `take`."""
    for module in decoder.modules():
        if isinstance(module, AdaptedLinear) and not module.weight.requires_grad:
            module.store_nf4()


def _add(
    parent: nn.Module, owner: str, leaf: str, shape: tuple[int, ...], adapter: AdapterSpec
) -> None:
    module = parent.get_submodule(owner)
    if isinstance(module, nn.Linear) and leaf != "bias":
        module = _replace(parent, owner, adapter)
        if leaf == "ia3_l":
            module.scales_input = owner.endswith("down")
    device = next(parent.parameters()).device
    module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device=device)))


def _replace(parent: nn.Module, name: str, adapter: AdapterSpec) -> AdaptedLinear:
    linear = parent.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    low_rank = {"scale": adapter.scale} if adapter.size else {}
    options = {**low_rank, "dropout": adapter.dropout, "double_quant": adapter.double_quantized}
    variant = adapted(linear, **options)
    path, _, leaf = name.rpartition(".")
    setattr(parent.get_submodule(path) if path else parent, leaf, variant)
    return variant
