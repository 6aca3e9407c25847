"""Which parameter of a decoder lies how over the tensor-parallel axis: attention by heads, MLPs and
experts by width,
vocabulary by rows; beside them, with sequence parallelism, activations by tokens.

Knows the model's names; what travels, and how a module runs on its parts, is `region`'s.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Block, Decoder
from workers.models.moe.layer import RoutedMlp
from workers.training.parallel.tensor.dropout import draw_apart
from workers.training.parallel.tensor.region import (
    ALIKE,
    SUMMED,
    Held,
    Region,
    distribute,
    gathered,
    once,
    reduced,
    rows,
    sharded,
    whole_dtensor,
)
from workers.training.parallel.tensor.vocabulary import VocabularyRows

COLUMNS, ROWS = sharded(0), sharded(1)


def apply_tensor(decoder: Decoder, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Lay a decoder, or a pipeline's part of one, over the 1-D `mesh`, in place; on meta or with
    weights.

    All parameters become DTensors on `mesh`, under their names. Logits are a DTensor sharded over
    the vocabulary
    (`objectives`, `vocabulary`), and so is a tied head's weight. Between blocks every rank holds
    all tokens, with
    `plan.sequence_parallel` its part of the sequence: a part of a model then takes and gives `[B, S
    / tp, hidden]`.
    Gradients of replicated parameters that ranks use for different heads or tokens are partial
    after a backward pass:
    `sum_partial` before the update (`fully_shard` does it by itself).
    """
    spec, rank = decoder.spec, mesh.get_local_rank()
    outside: Placement = Shard(1) if plan.sequence_parallel else Replicate()
    beside = SUMMED if plan.sequence_parallel else ALIKE
    norm, enter, leave = Region({}, other=beside), gathered(outside), reduced(outside)
    if decoder.part.first:
        _lay(decoder.embed, VocabularyRows(outside), mesh)
    elif decoder.embed is not None:  # a tied head's weight
        _lay(decoder.embed, VocabularyRows(Replicate()), mesh)
    if decoder.positions is not None:
        _lay(
            decoder.positions,
            Region({}, enter=_own_tokens if plan.sequence_parallel else None, other=beside),
            mesh,
        )
    for block in decoder.blocks.values():
        assert isinstance(block, Block)
        mlp = dense(rank)
        if isinstance(block.mlp, RoutedMlp):
            # a region of their own: where they are sharded by themselves, their weights are
            # gathered at their own call
            _lay(block.mlp.experts, Region(routed(rank)), mesh)
            mlp = dense(rank, "shared.")
        _lay(block.attn, Region(attention(spec, plan.tp, rank), enter=enter, leave=leave), mesh)
        _lay(block.mlp, Region(mlp, enter=enter, leave=leave), mesh)
        _lay(block.attn_norm, norm, mesh)
        _lay(block.mlp_norm, norm, mesh)
        if spec.dropout and not plan.sequence_parallel:
            draw_apart(block.attn, rank)
    if decoder.norm is not None:
        _lay(decoder.norm, Region({}, leave=whole_dtensor(outside), other=beside), mesh)
    if decoder.head is not None:
        distribute(decoder.head, "weight", decoder.head.weight, Shard(0), mesh)
    if plan.sequence_parallel:
        _rope_of_whole_sequences(decoder, plan.tp)


def attention(spec: ModelSpec, tp: int, rank: int) -> dict[str, Held]:
    """By heads. Latents, MFA's one key-value head and QK norms are on every rank, each for its own
    heads.

    Of fewer key-value heads than ranks each rank computes the one that its query heads share; their
    weights are whole
    on every rank.
    """
    held = {
        f"{name}.{kind}": COLUMNS for name in ("q", "q_up", "kv_up") for kind in ("weight", "bias")
    }
    held |= {"o.weight": ROWS, "o.bias": _once(rank)}
    if spec.attention == "softmax":
        key = COLUMNS
        if spec.kv_heads % tp:
            head = rank * spec.kv_heads // tp
            own = rows(head * spec.head_dim, (head + 1) * spec.head_dim)
            key = Held(Replicate(), Partial(), own)
        held |= {f"{name}.{kind}": key for name in ("k", "v") for kind in ("weight", "bias")}
    return held


def dense(rank: int, under: str = "") -> dict[str, Held]:
    """A gated or plain MLP by its width."""
    held = {
        f"{under}{name}.{kind}": COLUMNS for name in ("gate", "up") for kind in ("weight", "bias")
    }
    return held | {f"{under}down.weight": ROWS, f"{under}down.bias": _once(rank)}


def routed(rank: int) -> dict[str, Held]:
    """Every expert by its width, `[E, out, in]`.

    Shared ones lie as a dense MLP does; the router is on every rank.
    """
    held = {f"{name}.{kind}": sharded(1) for name in ("gate", "up") for kind in ("weight", "bias")}
    return held | {"down.weight": sharded(2), "down.bias": _once(rank)}


def _once(rank: int) -> Held:
    return Held(Replicate(), Partial(), once(rank))


def _lay(module: nn.Module | None, style: ParallelStyle, mesh: DeviceMesh) -> None:
    assert module is not None
    parallelize_module(module, mesh, style, src_data_rank=None)


def _own_tokens(positions: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of `[S]`, or `[B, S]` where they differ by row."""
    return positions.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]


def _rope_of_whole_sequences(decoder: Decoder, tp: int) -> None:
    """Attention sees whole sequences, the decoder's hidden states are a part of them."""
    plain, replaced = decoder._rope_for, cast(Any, decoder)
    replaced._rope_for = lambda tokens, device: plain(tokens * tp, device)
