"""Columns of what a run trains: trained, quantized and added parameters of the model's groups.

A run that trains all weights has the same columns as the model. Frozen layers are counted as an
average over the layers. Does not sum over stages or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from orchestrator.planner.model.terms import declare_inputs
from workers.contracts.catalog.adapter_shapes import (
    DOUBLE_BLOCK,
    NF4_BLOCK,
    adapter_shapes,
    block_linears,
    low_rank_linears,
    trained_shapes,
)
from workers.contracts.catalog.counts import attention_width, parameter_count
from workers.contracts.catalog.model_flops import (
    head_flops_per_token,
    lookup_parameters,
    model_flops,
)
from workers.contracts.catalog.parameter_shapes import parameter_shapes
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

_LAYER = (
    "norms",
    "attention_split",
    "attention_kv",
    "attention_whole",
    "dense_split",
    "dense_whole",
    "router",
    "expert_split",
    "expert_whole",
    "shared_split",
    "shared_whole",
)
_EDGE = ("embedding", "head", "positions", "final_norm")
_QUANTIZED = ("attention_split", "attention_kv", "attention_whole", "dense_split", "shared_split")

declare_inputs(
    "parameters",
    "train.freeze and train.adapter",
    *(f"trained_params_{name}" for name in (*_LAYER, *_EDGE)),
    *(f"quantized_{name}" for name in _QUANTIZED),
    "adapter_split",
    "adapter_whole",
    "adapter_edge",
)
declare_inputs("", "train.freeze and train.adapter", "trains_all")
declare_inputs("B", "0.5, and the scales of blocks of 64", "quantized_bytes")
declare_inputs(
    "FLOP/token",
    "workers.contracts.catalog.model_flops",
    "spared_flops",
    "adapter_flops",
    "head_flops",
    "second_products_flops",
    "second_attention_flops",
)
declare_inputs(
    "",
    "workers.contracts.catalog.model_flops",
    "attention_passes",
    "block_backward",
    "head_backward",
)
declare_inputs("numbers", "inputs and outputs of low-rank layers", "adapter_traffic")


def training_columns(
    model: ModelSpec, train: TrainBody | None, counts: Mapping[str, float]
) -> dict[str, float]:
    """The columns of a run; `counts` are the model's `params_...`. Without `train` all are trained.

    `adapter_split` and `adapter_whole` are added per layer, sharded by tensor parallelism or not;
    `adapter_edge` is added once.
    """
    columns = {f"trained_params_{name}": counts[f"params_{name}"] for name in (*_LAYER, *_EDGE)}
    columns |= {f"quantized_{name}": 0.0 for name in _QUANTIZED}
    columns |= {"adapter_split": 0.0, "adapter_whole": 0.0, "adapter_edge": 0.0}
    columns |= {"trains_all": 1.0, "quantized_bytes": 0.0}
    if train is None or (train.adapter is None and not train.freeze):
        return columns
    columns["trains_all"] = 0.0
    base, trained = parameter_shapes(model), trained_shapes(model, train)
    columns |= {f"trained_params_{name}": 0.0 for name in (*_LAYER, *_EDGE)}
    for name, shape in trained.items():
        if name in base:
            group = _group(model, name)
            columns[f"trained_params_{group}"] += math.prod(shape) / _layers_of(model, group)
    adapter = train.adapter
    if adapter is None:
        return columns
    for name, shape in adapter_shapes(model, adapter).items():
        columns[_added(name)] += math.prod(shape) / (
            model.layers if name.startswith("blocks.") else 1
        )
    if adapter.storage is not None:
        double = adapter.double_quantized
        scale = (1 + 4 / DOUBLE_BLOCK) if double else 4
        columns["quantized_bytes"] = 0.5 + scale / NF4_BLOCK
        for layer in range(model.layers):
            for module, shape in block_linears(model, layer).items():
                group = _group(model, f"blocks.{layer}.{module}.weight")
                columns[f"quantized_{group}"] += math.prod(shape) / _layers_of(model, group)
    return columns


def flops_columns(
    model: ModelSpec, train: TrainBody | None, seq_len: int, second: ModelSpec | None
) -> dict[str, float]:
    """What frozen weights spare, and what adapters and a second module add, per token.

    `head_flops`: of the heads, which only positions with logits need.
    `attention_passes`: forward passes of attention that its FLOPs are worth, 3 per trained layer.
    `block_backward`: FLOPs of the blocks' backward products over those forward, 2 if all are
    trained; `head_backward` the same of the head. `adapter_traffic`: numbers per token and layer
    that low-rank updates move.
    """
    columns = {"spared_flops": 0.0, "adapter_flops": 0.0, "adapter_traffic": 0.0}
    columns |= {"second_products_flops": 0.0, "second_attention_flops": 0.0}
    columns |= {"attention_passes": 3.0 * model.layers, "block_backward": 2.0}
    columns["head_backward"] = 2.0
    rows = 1 if model.scalar_head else model.vocab
    columns["head_flops"] = 6.0 * rows * model.hidden
    if train is None:
        return columns
    columns["head_flops"] = head_flops_per_token(model, train)
    flops = model_flops(model, train, second=second, seq_len=seq_len)
    columns["second_products_flops"] = flops.second_products
    columns["second_attention_flops"] = flops.second_attention
    if train.adapter is None and not train.freeze:
        return columns
    base = parameter_shapes(model)
    own = {name: value for name, value in flops.products.items() if name in base}
    full = 6 * (parameter_count(model).active - lookup_parameters(model))
    columns["spared_flops"] = full - sum(own.values())
    columns["adapter_flops"] = sum(flops.products.values()) - sum(own.values())
    columns["attention_passes"] = flops.attention / (4 * attention_width(model) * seq_len)
    share = model.moe.top_k / model.moe.experts if model.moe else 1.0
    forward = sum(
        2 * math.prod(base[name]) * (share if ".experts." in name else 1.0)
        for name in own
        if name.startswith("blocks.")
    )
    total = sum(value for name, value in own.items() if name.startswith("blocks."))
    columns["block_backward"] = total / forward - 1
    head = own["embed.weight" if model.tie_embeddings else "head.weight"]
    columns["head_backward"] = head / (2 * rows * model.hidden) - 1
    if train.adapter is not None:
        for layer in range(model.layers):
            for outputs, inputs in low_rank_linears(model, train.adapter, layer).values():
                columns["adapter_traffic"] += (inputs + 4 * outputs) / model.layers
    return columns


def _layers_of(model: ModelSpec, group: str) -> int:
    """How many times the terms multiply a group's parameters."""
    if group in _EDGE:
        return 1
    kind = group.partition("_")[0]
    if kind == "dense":
        return model.layers - model.moe_layers
    if kind in ("router", "expert", "shared"):
        experts = model.moe.experts if model.moe and kind == "expert" else 1
        return model.moe_layers * experts
    return model.layers


def _group(model: ModelSpec, name: str) -> str:
    """The group of `params_...` columns that counts a parameter."""
    if not name.startswith("blocks."):
        return {
            "embed": "embedding",
            "positions": "positions",
            "head": "head",
            "norm": "final_norm",
        }[name.partition(".")[0]]
    inner = name.split(".", 2)[2]
    module, _, leaf = inner.rpartition(".")
    whole = leaf == "bias" and module.endswith((".down", ".o"))
    if inner.startswith("attn."):
        if module in ("attn.q_norm", "attn.k_norm") or whole or "latent_norm" in module:
            return "attention_whole"
        if model.attention == "softmax":
            return "attention_kv" if module in ("attn.k", "attn.v") else "attention_split"
        replicated = ("attn.q_down", "attn.kv_down", "attn.k", "attn.v")
        return "attention_whole" if module in replicated else "attention_split"
    if "router" in inner:
        return "router"
    for kind in ("experts", "shared"):
        if f".{kind}." in inner:
            return f"{kind.removesuffix('s')}_{'whole' if whole else 'split'}"
    if inner.startswith("mlp."):
        return f"dense_{'whole' if whole else 'split'}"
    return "norms"


def _added(name: str) -> str:
    """The column of a parameter that an adapter adds."""
    if not name.startswith("blocks."):
        return "adapter_edge"
    module, _, leaf = name.rpartition(".")
    inputs = module.endswith((".o", ".down")) and "_adapter" not in module
    split = {
        "lora_A": inputs,
        "lora_B": not inputs,
        "lora_magnitude": not inputs,
        "ia3_l": True,
        "bias": not inputs and "_adapter" not in module,
        "prefix_k": True,
        "prefix_v": True,
    }
    return "adapter_split" if split.get(leaf, False) else "adapter_whole"
