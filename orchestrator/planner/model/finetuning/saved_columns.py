"""Columns of what a run's backward pass needs: inputs of trained products, elements of its layers.

A product's input is saved for the gradient of its weight or of a low-rank update; what lies between
products is saved if anything before it is trained. Shares are averages over the layers, 1 if all
weights are trained. Does not depend on bytes or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.planner.model.terms import declare_inputs
from workers.contracts.catalog.adapter_shapes import (
    adapter_shapes,
    block_linears,
    low_rank_linears,
    trained_shapes,
)
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

# products of a block by what they read
_READERS: dict[str, tuple[str, ...]] = {
    "keeps_qkv_input": ("attn.q", "attn.k", "attn.v", "attn.q_down", "attn.kv_down"),
    "keeps_mlp_input": (
        "mlp.gate",
        "mlp.up",
        "mlp.router",
        "mlp.shared.gate",
        "mlp.shared.up",
        "mlp.experts.gate",
        "mlp.experts.up",
    ),
    "keeps_down_input": ("mlp.down", "mlp.shared.down", "mlp.experts.down"),
}
_SHARES = (*_READERS, "keeps_norm_products", "keeps_layers", "keeps_final_norm", "keeps_head_input")

declare_inputs("", "train.freeze and train.adapter", *_SHARES, "trains_head", "trains_table")
declare_inputs(
    "numbers per token",
    "train.adapter",
    "adapter_saved_split",
    "adapter_saved_whole",
    "adapter_saved_masks",
    "virtual_tokens",
)
declare_inputs("parameters", "the largest linear layer in 4 bits", "quantized_layer_params")


def saved_columns(model: ModelSpec, train: TrainBody | None) -> dict[str, float]:
    """The columns of a run; without `train` all weights are trained."""
    columns = dict.fromkeys((*_SHARES, "trains_head", "trains_table"), 1.0)
    columns |= {"adapter_saved_split": 0.0, "adapter_saved_whole": 0.0, "virtual_tokens": 0.0}
    columns |= {"adapter_saved_masks": 0.0, "quantized_layer_params": 0.0}
    if train is None or (train.adapter is None and not train.freeze):
        return columns
    trained, adapter = set(trained_shapes(model, train)), train.adapter
    added = adapter_shapes(model, adapter) if adapter is not None else {}
    table = {"embed.weight", "positions.weight"} & trained
    reached = bool(table) or any(name.startswith("prompt.") for name in added)
    sums = dict.fromkeys(_SHARES, 0.0)
    for layer in range(model.layers):
        prefix = f"blocks.{layer}."
        own = {name.removeprefix(prefix) for name in trained if name.startswith(prefix)}
        adapted = set()
        if adapter is not None:
            adapted = set(low_rank_linears(model, adapter, layer))
        for column, modules in _READERS.items():
            used = any(f"{each}.weight" in own or each in adapted for each in modules)
            sums[column] += used
        # IA3 saves the product that it scales, the input of the last product
        sums["keeps_down_input"] += adapter is not None and adapter.method == "ia3"
        sums["keeps_norm_products"] += any("norm.weight" in name for name in own)
        new = [name for name in added if name.startswith(prefix)]
        reached = reached or bool(own or new)
        sums["keeps_layers"] += reached
    # norms are counted in layers that are kept
    sums["keeps_norm_products"] *= model.layers / max(1.0, sums["keeps_layers"])
    columns |= {name: value / model.layers for name, value in sums.items()}
    head = "embed.weight" if model.tie_embeddings else "head.weight"
    columns["keeps_head_input"] = columns["trains_head"] = float(head in trained)
    columns["keeps_final_norm"] = float("norm.weight" in trained)
    columns["trains_table"] = float("embed.weight" in trained)
    if adapter is not None:
        columns |= _adapter_columns(model, train)
    return columns


def _adapter_columns(model: ModelSpec, train: TrainBody) -> Mapping[str, float]:
    adapter = train.adapter
    assert adapter is not None
    split = whole = masks = 0.0
    for layer in range(model.layers):
        for name, (outputs, inputs) in low_rank_linears(model, adapter, layer).items():
            by_rows = not name.endswith((".o", ".down"))
            whole += adapter.size
            split += outputs if adapter.method == "dora" and by_rows else 0
            whole += outputs if adapter.method == "dora" and not by_rows else 0
            masks += inputs if adapter.dropout else 0
    if adapter.method == "ia3":
        split += model.layers * 2 * model.kv_heads * model.head_dim
    if adapter.method == "adapter":
        whole += model.layers * 2 * (model.hidden + 2 * adapter.size)
    linears = block_linears(model, 0).values() if adapter.storage is not None else ()
    return {
        "adapter_saved_split": split / model.layers,
        "adapter_saved_whole": whole / model.layers,
        "adapter_saved_masks": masks / model.layers,
        "virtual_tokens": float(adapter.size if adapter.method in ("prompt", "p_tuning") else 0),
        "quantized_layer_params": float(
            max((outputs * inputs for outputs, inputs in linears), default=0)
        ),
    }
