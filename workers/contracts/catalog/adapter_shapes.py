"""Parameters that an adapter adds to a model or trains of it, by name, from specs alone.

The same names as the modules of `workers.models.adapters`. Does not depend on torch.
"""

from __future__ import annotations

from workers.contracts.catalog.parameter_shapes import (
    Shapes,
    element_count,
    frozen_names,
    layer_shapes,
    parameter_shapes,
)
from workers.contracts.specs.finetuning.adapters import LOW_RANK, AdapterSpec, AdapterTarget
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

# NF4's block: inputs of one output that share a scale
NF4_BLOCK = 64
# scales that share a scale of their own with double quantization
DOUBLE_BLOCK = 256
# linear layers of each target, in attention of every kind and in dense or shared MLPs
_MODULES: dict[AdapterTarget, tuple[str, ...]] = {
    "q": ("attn.q", "attn.q_down", "attn.q_up"),
    "k": ("attn.k", "attn.kv_down", "attn.kv_up"),
    "v": ("attn.v", "attn.kv_down", "attn.kv_up"),
    "o": ("attn.o",),
    "gate": ("mlp.gate", "mlp.shared.gate"),
    "up": ("mlp.up", "mlp.shared.up"),
    "down": ("mlp.down", "mlp.shared.down"),
}
# Hugging Face's names of modules that can be trained in full, and ours
SAVED_MODULES = {"lm_head": "head", "embed_tokens": "embed"}
_IA3 = {"attn.k": 0, "attn.v": 0, "mlp.down": 1}  # the scaled dim of the weight


def block_linears(model: ModelSpec, layer: int) -> Shapes:
    """`(outputs, inputs)` of the linear layers of a block, without router and routed experts."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in layer_shapes(model, layer).items()
        if name.endswith(".weight") and len(shape) == 2 and ".router." not in name
    }


def low_rank_linears(model: ModelSpec, adapter: AdapterSpec, layer: int) -> Shapes:
    """The linear layers of a block that get low-rank updates; empty for other methods."""
    if adapter.method not in LOW_RANK:
        return {}
    wanted = {module for target in adapter.projections for module in _MODULES[target]}
    return {name: shape for name, shape in block_linears(model, layer).items() if name in wanted}


def adapter_layer_shapes(model: ModelSpec, adapter: AdapterSpec, layer: int) -> Shapes:
    """What the adapter adds to one block, by names within the block."""
    size, shapes = adapter.size, Shapes()
    for name, (outputs, inputs) in low_rank_linears(model, adapter, layer).items():
        shapes[f"{name}.lora_A"] = (size, inputs)
        shapes[f"{name}.lora_B"] = (outputs, size)
        if adapter.method == "dora":
            shapes[f"{name}.lora_magnitude"] = (outputs,)
    if adapter.method == "ia3":
        linears = block_linears(model, layer)
        for name, dim in _IA3.items():
            if name in linears:
                shapes[f"{name}.ia3_l"] = (linears[name][dim],)
    if adapter.method == "bitfit":
        own = layer_shapes(model, layer)
        full = layer_shapes(with_biases(model), layer)
        shapes = {name: shape for name, shape in full.items() if name not in own}
    if adapter.method == "adapter":
        for place in ("attn_adapter", "mlp_adapter"):
            shapes[f"{place}.down.weight"] = (size, model.hidden)
            shapes[f"{place}.down.bias"] = (size,)
            shapes[f"{place}.up.weight"] = (model.hidden, size)
            shapes[f"{place}.up.bias"] = (model.hidden,)
    if adapter.method in ("prefix", "p_tuning_v2"):
        width = model.kv_heads * model.head_dim
        shapes["attn.prefix_k"] = shapes["attn.prefix_v"] = (width, size)
    return shapes


def adapter_shapes(model: ModelSpec, adapter: AdapterSpec) -> Shapes:
    """Every parameter that the adapter adds, by name."""
    shapes: Shapes = {}
    if adapter.method in ("prompt", "p_tuning"):
        shapes["prompt.embedding"] = (adapter.size, model.hidden)
    if adapter.method == "p_tuning":
        for name in ("0", "2", "4"):
            shapes[f"prompt.encoder.{name}.weight"] = (model.hidden, model.hidden)
            shapes[f"prompt.encoder.{name}.bias"] = (model.hidden,)
    for layer in range(model.layers):
        for name, shape in adapter_layer_shapes(model, adapter, layer).items():
            shapes[f"blocks.{layer}.{name}"] = shape
    if adapter.method == "bitfit" and model.norm == "layernorm" and model.bias != "all":
        shapes["norm.bias"] = (model.hidden,)
    return shapes


def trained_base_names(model: ModelSpec, adapter: AdapterSpec) -> set[str]:
    """Parameters of the model itself that are trained next to an adapter."""
    names = list(parameter_shapes(model))
    prefixes = tuple(f"{SAVED_MODULES.get(each, each)}." for each in adapter.modules_to_save)
    saved = {name for name in names if prefixes and name.startswith(prefixes)}
    if model.scalar_head:  # the base has none
        saved.add("head.weight")
    if adapter.method == "bitfit":
        saved |= {name for name in names if name.endswith(".bias")}
    return saved


def trained_shapes(model: ModelSpec, train: TrainBody) -> Shapes:
    """Every parameter that a run updates, by name: an adapter's, or all that are not frozen."""
    shapes = parameter_shapes(model)
    if train.adapter is not None:
        base = trained_base_names(model, train.adapter)
        return {
            **{name: shapes[name] for name in shapes if name in base},
            **adapter_shapes(model, train.adapter),
        }
    frozen = frozen_names(list(shapes), train.freeze)
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def trained_parameter_count(model: ModelSpec, train: TrainBody) -> int:
    """Parameters that a run updates."""
    return element_count(trained_shapes(model, train))


def with_biases(model: ModelSpec) -> ModelSpec:
    """The model with a bias in every linear layer and LayerNorm of its blocks."""
    return model.model_copy(update={"bias": "all"})
