"""Model FLOPs of a training token: of all weights, of frozen ones, of adapters and second modules.

The one rule that the engine's MFU and the planner count by. Does not depend on plans, time or
recomputation, nor on torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workers.contracts.catalog.adapter_shapes import adapter_shapes, trained_shapes
from workers.contracts.catalog.counts import attention_width, parameter_count
from workers.contracts.catalog.parameter_shapes import layer_shapes, parameter_shapes
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

# how a recorded run says which parameters its `mfu` counts; older runs have no rule
MFU_RULE = "6 (N - lookup) + attention"

# the modules of a block in the order in which they compute; those of a stage share their input
_STAGES: tuple[tuple[str, ...], ...] = (
    ("attn_norm",),
    ("attn.q", "attn.k", "attn.v", "attn.q_down", "attn.kv_down"),
    ("attn.q_latent_norm", "attn.kv_latent_norm"),
    ("attn.q_up", "attn.kv_up"),
    ("attn.q_norm", "attn.k_norm", "attn.prefix_k", "attn.prefix_v"),
    ("attn.o",),
    ("attn_adapter.down",),
    ("attn_adapter.up",),
    ("mlp_norm",),
    ("mlp.router", "mlp.gate", "mlp.up", "mlp.experts.gate", "mlp.experts.up"),
    ("mlp.shared.gate", "mlp.shared.up"),
    ("mlp.down", "mlp.experts.down", "mlp.shared.down"),
    ("mlp_adapter.down",),
    ("mlp_adapter.up",),
)
_CORE = 5  # attention runs before this stage
_ADDED = ("lora_A", "lora_B", "lora_magnitude", "ia3_l", "weight", "bias")


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs per token of one step, forward and backward; attention over the full square.

    `products` by parameter name, of the model and its adapter: 2 per parameter forward, 2 for the
    weight's gradient if it is trained, 2 for the input's gradient if something before it is
    trained. `attention`: scores and values. `second_products` and `second_attention`: the forward
    pass of a reference or teacher.
    """

    products: dict[str, float]
    attention: float
    second_products: float = 0.0
    second_attention: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.products.values()) + self.attention + self.second

    @property
    def second(self) -> float:
        """The forward pass of the second module."""
        return self.second_products + self.second_attention


def lookup_parameters(model: ModelSpec) -> int:
    """Parameters that a token only looks up: positions, and a token table that is not the head."""
    count = parameter_count(model)
    return count.positions + (0 if model.tie_embeddings else count.embedding)


def flops_per_token(
    model: ModelSpec, seq_len: int, *, attention: Literal["full", "causal"] = "full"
) -> float:
    """Model FLOPs of one token if all weights are trained: 6 (N - lookup) + 12·L·h·s.

    N is every parameter that a token uses: all of them in a dense model, `active` ones in a mixture
    of experts. The input embedding table is a lookup and not counted unless the output head shares
    it; learned positions are not counted (PaLM, arXiv 2204.02311, appendix B). h is the attention
    width: heads x head_dim, which is `hidden` in most models (MLA: the mean of key and value
    widths). "full" counts the full s x s square, "causal" half of it. A window does not reduce the
    count.
    """
    square = 12 * model.layers * attention_width(model) * seq_len
    weights = parameter_count(model).active - lookup_parameters(model)
    return float(6 * weights + (square if attention == "full" else square / 2))


def forward_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """The forward pass of a reference or teacher: a third of `flops_per_token`."""
    return flops_per_token(model, seq_len) / 3


def second_module(train: TrainBody) -> Literal["reference", "teacher"] | None:
    """The frozen module that a run computes next to the trained one."""
    if train.distill is not None:
        return "teacher"
    return "reference" if train.compares else None


def training_flops_per_token(
    model: ModelSpec,
    train: TrainBody,
    *,
    second: ModelSpec | None = None,
    seq_len: int | None = None,
) -> float:
    """Model FLOPs of one token of a run, with its frozen weights, adapter and second module.

    `second` is the teacher's shape; a reference has the model's own. FLOPs that only a plan adds
    (recomputation, dequantization) are not counted, as in `flops_per_token`.
    """
    seq_len = train.seq_len if seq_len is None else seq_len
    if train.adapter is None and not train.freeze and second_module(train) is None:
        return flops_per_token(model, seq_len)
    return model_flops(model, train, second=second, seq_len=seq_len).total


def head_flops_per_token(model: ModelSpec, train: TrainBody) -> float:
    """The part of `training_flops_per_token` that only positions with logits need.

    It is that of the trained model's head, and of a reference's.
    """
    name = "embed.weight" if model.tie_embeddings else "head.weight"
    rows = 1 if model.scalar_head else model.vocab
    reference = 2.0 * rows * model.hidden if second_module(train) == "reference" else 0.0
    return model_flops(model, train).products[name] + reference


def model_flops(
    model: ModelSpec,
    train: TrainBody,
    *,
    second: ModelSpec | None = None,
    seq_len: int | None = None,
) -> ModelFlops:
    """The parts of `training_flops_per_token`. Virtual tokens are counted as the text's share."""
    seq_len = train.seq_len if seq_len is None else seq_len
    adapter = train.adapter
    trained = frozenset(trained_shapes(model, train))
    added = adapter_shapes(model, adapter) if adapter is not None else {}
    virtual, prefixed = _virtual_tokens(adapter)
    longer = 1 + virtual / seq_len
    seen = seq_len + virtual + prefixed
    products: dict[str, float] = {}
    names = [name for name in added if name.startswith("prompt.")]
    reached = bool(names) or bool({"embed.weight", "positions.weight"} & trained)
    core = 4 * attention_width(model) * seen * longer
    attention = 0.0
    for layer in range(model.layers):
        operands = set("qkv") if reached else set()
        for stage, modules in enumerate(_stages(model, layer, added)):
            if stage == _CORE:
                attention += core * (1 + _core_backward(operands) / 4)
            changed = False
            for name, elements in modules:
                own = name in trained or name in added
                changed = changed or own
                operands |= _operands(name) if own else set()
                inputs = reached or name.endswith("lora_B")
                products[name] = elements * longer * (2 + 2 * own + 2 * inputs)
            reached = reached or changed
    for name in ("norm.weight", "norm.bias", "head.weight"):
        shape = parameter_shapes(model).get(name, added.get(name))
        tied = name == "head.weight" and model.tie_embeddings
        if shape is None and not tied:
            continue
        own = "embed.weight" in trained if tied else (name in trained or name in added)
        size = model.vocab * model.hidden if tied else math.prod(shape or ())
        products["embed.weight" if tied else name] = size * (2.0 + 2 * own + 2 * reached)
        reached = reached or own
    kind = second_module(train)
    other = model if kind == "reference" else second
    if kind is None or other is None:
        return ModelFlops(products, attention)
    square = 4 * other.layers * attention_width(other) * seq_len
    whole = forward_flops_per_token(other, seq_len)
    return ModelFlops(products, attention, whole - square, square)


def _operands(name: str) -> set[str]:
    """The operands of attention that a parameter of a block changes."""
    leaf = name.split(".", 2)[2].removeprefix("attn.").partition(".")[0].removeprefix("prefix_")
    return set("qkv") if leaf == "attn_norm" else set("kv") if leaf[:2] == "kv" else {leaf[0]}


def _core_backward(operands: set[str]) -> int:
    """FLOPs of attention's backward pass; the forward pass has 4: scores, and weighted values."""
    scores = bool(operands & {"q", "k"})
    return 2 * (("v" in operands) + scores + ("q" in operands) + ("k" in operands))


def _virtual_tokens(adapter: AdapterSpec | None) -> tuple[int, int]:
    """Virtual tokens that pass through the model, and those that only attention sees."""
    if adapter is None:
        return 0, 0
    if adapter.method in ("prompt", "p_tuning"):
        return adapter.size, 0
    return 0, adapter.size if adapter.method in ("prefix", "p_tuning_v2") else 0


def _stages(
    model: ModelSpec, layer: int, added: dict[str, tuple[int, ...]]
) -> Iterator[list[tuple[str, float]]]:
    """`(name, elements that a token uses)` of the parameters of a block, stage by stage.

    Keys and values of a prefix are not products of a token's: they count 0 and need a gradient.
    """
    prefix, own = f"blocks.{layer}.", layer_shapes(model, layer)
    shapes = {**own}
    for name, shape in added.items():
        if name.startswith(prefix):
            shapes[name.removeprefix(prefix)] = shape
    share = model.moe.top_k / model.moe.experts if model.moe else 1.0
    for modules in _STAGES:
        matches = []
        for name, shape in shapes.items():
            module, _, leaf = name.rpartition(".")
            place = module if leaf in _ADDED else name
            if place not in modules:
                continue
            used = 0.0 if "prefix_" in leaf else math.prod(shape)
            matches.append((f"{prefix}{name}", used * (share if ".experts." in name else 1.0)))
        yield matches
