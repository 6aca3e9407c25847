"""Which parameter of a decoder lies how over the tensor-parallel axis: attention by heads, MLPs and
experts by width,
vocabulary by rows; beside them, with sequence parallelism, activations by tokens.

Knows the model's names; what travels, and how a module runs on its parts, is `region`'s.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Block, Decoder
from workers.models.moe.layer import RoutedMlp
from workers.models.tensor_parallel_plan import VOCABULARY_DIM, block_plan
from workers.training.parallel.tensor.dropout import draw_apart
from workers.training.parallel.tensor.region import (
    ALIKE,
    SUMMED,
    ParameterSharding,
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
    held = partial(held_parameters, spec, tp=plan.tp, rank=rank)
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
        if isinstance(block.mlp, RoutedMlp):
            # their own region: if they are sharded by themselves, their weights are gathered at
            # their own call
            _lay(block.mlp.experts, Region(held("mlp.experts.")), mesh)
        _lay(block.attn, Region(held("attn."), enter=enter, leave=leave), mesh)
        _lay(block.mlp, Region(held("mlp."), enter=enter, leave=leave), mesh)
        _lay(block.attn_norm, norm, mesh)
        _lay(block.mlp_norm, norm, mesh)
        if spec.dropout and not plan.sequence_parallel:
            draw_apart(block.attn, rank)
    if decoder.norm is not None:
        _lay(decoder.norm, Region({}, leave=whole_dtensor(outside), other=beside), mesh)
    if decoder.head is not None:
        distribute(decoder.head, "weight", decoder.head.weight, Shard(VOCABULARY_DIM), mesh)
    if plan.sequence_parallel:
        _rope_of_whole_sequences(decoder, plan.tp)


def held_parameters(
    spec: ModelSpec, prefix: str, *, tp: int, rank: int
) -> dict[str, ParameterSharding]:
    """Parameters of the block's module `prefix`, by name within it.

    With fewer key-value heads than ranks, their weights are replicated and each rank uses the head
    of its query heads.
    """
    held = {}
    for name, shard in block_plan(spec).items():
        if not name.startswith(prefix):
            continue
        if shard.dim is None:
            how = ParameterSharding(Replicate(), Partial(), once(rank))
        elif shard.style == "kv_heads" and spec.kv_heads % tp:
            head = rank * spec.kv_heads // tp
            own = rows(head * spec.head_dim, (head + 1) * spec.head_dim)
            how = ParameterSharding(Replicate(), Partial(), own)
        else:
            how = sharded(shard.dim)
        held[name.removeprefix(prefix)] = how
    return held


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
