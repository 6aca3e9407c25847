"""Names and shapes of a model's parameters from its spec alone, and which of them are trained.

The same names as the decoder of `workers.models`. Does not depend on torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from workers.contracts.specs.model import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(model: ModelSpec) -> Shapes:
    """Every parameter's shape by name, without buffers (routers' balancing biases)."""
    shapes: Shapes = {"embed.weight": (model.vocab, model.hidden)}
    if model.position == "learned":
        shapes["positions.weight"] = (model.max_seq_len, model.hidden)
    for layer in range(model.layers):
        for name, shape in layer_shapes(model, layer).items():
            shapes[f"blocks.{layer}.{name}"] = shape
    shapes |= _norm(model, "norm")
    if not model.tie_embeddings:
        shapes["head.weight"] = (1 if model.scalar_head else model.vocab, model.hidden)
    return shapes


def layer_shapes(model: ModelSpec, layer: int) -> Shapes:
    """Shapes of one layer's parameters by their names within its block."""
    shapes = _norm(model, "attn_norm")
    for name, outputs, inputs, biased in _attention_linears(model):
        shapes |= _linear(f"attn.{name}", outputs, inputs, bias=biased)
    shapes |= {f"attn.{name}": (width,) for name, width in _attention_norms(model)}
    shapes |= _norm(model, "mlp_norm")
    every = model.bias == "all"
    if model.moe is None or not model.is_moe_layer(layer):
        for name, outputs, inputs in _mlp_linears(model, model.ffn):
            shapes |= _linear(f"mlp.{name}", outputs, inputs, bias=every)
        return shapes
    moe = model.moe
    shapes["mlp.router.weight"] = (moe.experts, model.hidden)
    for name, outputs, inputs in _mlp_linears(model, moe.expert_ffn):
        shapes[f"mlp.experts.{name}.weight"] = (moe.experts, outputs, inputs)
        if every:
            shapes[f"mlp.experts.{name}.bias"] = (moe.experts, outputs)
    if moe.shared_experts:
        for name, outputs, inputs in _mlp_linears(model, moe.shared_width):
            shapes |= _linear(f"mlp.shared.{name}", outputs, inputs, bias=every)
    return shapes


def frozen_names(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The parameters that any of the patterns (fnmatch, case-sensitive) matches."""
    return {name for name in names if any(fnmatchcase(name, each) for each in patterns)}


def element_count(shapes: Shapes) -> int:
    """Parameters of all tensors together."""
    return sum(math.prod(shape) for shape in shapes.values())


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _norm(model: ModelSpec, name: str) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (model.hidden,)}
    if model.norm == "layernorm" and model.bias == "all":
        shapes[f"{name}.bias"] = (model.hidden,)
    return shapes


def _mlp_linears(model: ModelSpec, width: int) -> Iterator[tuple[str, int, int]]:
    if model.gated_mlp:
        yield "gate", width, model.hidden
    yield "up", width, model.hidden
    yield "down", model.hidden, width


def _attention_linears(model: ModelSpec) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs, inputs and whether it has a bias."""
    hidden, inner, out = model.hidden, model.bias != "none", model.bias == "all"
    if model.mla is not None:
        mla = model.mla
        queries = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank:
            yield "q_down", mla.q_lora_rank, hidden, inner
            yield "q_up", queries, mla.q_lora_rank, False
        else:
            yield "q", queries, hidden, inner
        yield "kv_down", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden, inner
        keys_values = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield "kv_up", keys_values, mla.kv_lora_rank, False
        yield "o", hidden, model.heads * mla.v_head_dim, out
    elif model.mfa is not None:
        mfa = model.mfa
        yield "q_down", mfa.qk_rank, hidden, inner
        yield "q_up", mfa.heads * mfa.head_dim, mfa.qk_rank, False
        yield "k", mfa.head_dim, hidden, inner
        yield "v", mfa.head_dim, hidden, inner
        yield "o", hidden, mfa.heads * mfa.head_dim, out
    else:
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        yield "q", queries, hidden, inner
        yield "k", keys, hidden, inner
        yield "v", keys, hidden, inner
        yield "o", hidden, queries, out


def _attention_norms(model: ModelSpec) -> Iterator[tuple[str, int]]:
    if model.mla is not None:
        if model.mla.q_lora_rank:
            yield "q_latent_norm.weight", model.mla.q_lora_rank
        yield "kv_latent_norm.weight", model.mla.kv_lora_rank
        return
    width = model.head_dim
    if model.mfa is not None:
        yield "q_latent_norm.weight", model.mfa.qk_rank
        width = model.mfa.head_dim
    if model.qk_norm:
        yield "q_norm.weight", width
        yield "k_norm.weight", width
