"""Applies the tensor-parallel plan to a decoder: block parameters, vocabulary, norms, positions.

The plan itself is `workers.models.tensor_parallel_plan`; redistribution is `region`'s.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.models.adapters.linear import AdaptedLinear
from workers.models.decoder import Block, Decoder
from workers.models.moe.layer import RoutedMlp
from workers.models.tensor_parallel_plan import VOCABULARY_DIM, block_plan
from workers.training.parallel.tensor.dropout_streams import rank_stream
from workers.training.parallel.tensor.region import (
    REPLICATED,
    SUMMED,
    ParameterSharding,
    Region,
    distribute,
    first_rank_only,
    gathered,
    reduced,
    replicated_dtensor,
    rows,
    sharded,
    unchanged,
)
from workers.training.parallel.tensor.vocabulary import shard_embedding


def apply_tensor(decoder: Decoder, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Shard a decoder or a pipeline's part over the 1-D `mesh`; in place, on meta or with weights.

    All parameters become DTensors on `mesh`, under their names. Logits are a DTensor sharded over
    the vocabulary (`objective`, `vocabulary`), as is a tied head's weight. Between blocks every
    rank holds all tokens; with `plan.sequence_parallel` its part of the sequence: a part of a model
    then takes and gives `[B, S / tp, hidden]`. After a backward pass, gradients of replicated
    parameters that ranks use for different heads or tokens are partial: call `sum_partial` before
    the update (`fully_shard` does it itself).
    """
    spec, rank = decoder.spec, mesh.get_local_rank()
    outside: Placement = Shard(1) if plan.sequence_parallel else Replicate()
    replicated = SUMMED if plan.sequence_parallel else REPLICATED
    norm = Region({}, other=replicated)
    enter, leave = gathered(outside), reduced(outside)
    parameters = partial(parameter_shardings, spec, tp=plan.tp, rank=rank)
    own_dropout = rank_stream(rank) if spec.dropout and not plan.sequence_parallel else unchanged
    attention = Region(parameters("attn."), enter=enter, leave=leave, around=own_dropout)
    if decoder.embed is not None:  # or only a tied head's weight
        decoder.embed = shard_embedding(
            decoder.embed, outside if decoder.part.first else Replicate(), mesh
        )
    if decoder.positions is not None:
        positions = _own_tokens if plan.sequence_parallel else None
        _apply(decoder, "positions", Region({}, enter=positions, other=replicated), mesh)
    if decoder.prompt is not None:
        _apply(decoder, "prompt", Region({}, other=REPLICATED), mesh)
    for block in decoder.blocks.values():
        assert isinstance(block, Block)
        if isinstance(block.mlp, RoutedMlp):
            # their own region: if they are sharded by themselves, their weights are gathered at
            # their own call
            _apply(block.mlp, "experts", Region(parameters("mlp.experts.")), mesh)
        for name, module in block.named_modules():
            if isinstance(module, AdaptedLinear) and name.endswith((".o", ".down")):
                module.norm_group = mesh.get_group()
        _apply(block, "attn", attention, mesh)
        _apply(block, "mlp", Region(parameters("mlp."), enter=enter, leave=leave), mesh)
        for name in ("attn_adapter", "mlp_adapter"):
            if getattr(block, name) is not None:
                _apply(block, name, norm, mesh)
        _apply(block, "attn_norm", norm, mesh)
        _apply(block, "mlp_norm", norm, mesh)
    if decoder.norm is not None:
        last = Region({}, leave=replicated_dtensor(outside), other=replicated)
        _apply(decoder, "norm", last, mesh)
    if decoder.head is not None:
        # a scalar head's one row is on every rank
        place = Replicate() if spec.scalar_head else Shard(VOCABULARY_DIM)
        distribute(decoder.head, "weight", decoder.head.weight, place, mesh)
    if plan.sequence_parallel:
        decoder.sequence_shards = plan.tp


def parameter_shardings(
    spec: ModelSpec, prefix: str, *, tp: int, rank: int
) -> dict[str, ParameterSharding]:
    """Parameters of the block's module `prefix`, by name within it.

    With fewer key-value heads than ranks, their weights are replicated and each rank uses the head
    of its query heads.
    """
    shardings = {}
    for name, shard in block_plan(spec).items():
        if not name.startswith(prefix):
            continue
        if shard.dim is None:
            sharding = ParameterSharding(Replicate(), Partial(), first_rank_only(rank))
        elif shard.style == "kv_heads" and spec.kv_heads % tp:
            head = rank * spec.kv_heads // tp
            own = rows(head * spec.head_dim, (head + 1) * spec.head_dim)
            sharding = ParameterSharding(Replicate(), Partial(), own)
        else:
            sharding = sharded(shard.dim)
        shardings[name.removeprefix(prefix)] = sharding
    return shardings


def _apply(parent: nn.Module, name: str, style: ParallelStyle, mesh: DeviceMesh) -> None:
    module = parent.get_submodule(name)
    parent.register_module(name, parallelize_module(module, mesh, style, src_data_rank=None))


def _own_tokens(positions: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of `[S]`, or of `[B, S]` if positions differ by row."""
    return positions.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]
