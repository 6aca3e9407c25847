"""Builds this rank's share of a model under a plan, with torch's own parallelism.

Parts are built on the meta device and go through the ordered list in `transforms`; then gradient
reduction, dropout seeds and tied embeddings are added. Does not depend on optimizers or data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.metrics.memory import local_tensor
from workers.models.decoder import Decoder
from workers.models.layers import cpu_operations
from workers.models.weights.parameter_shapes import named_weights
from workers.training.numerics.cpu_matmul import prefer_onednn
from workers.training.numerics.precision import DTYPES, CastCopies, casts_of, store_weights
from workers.training.optim.parameter_layout import has_mesh_axis, shard_count
from workers.training.parallel.dropout_seeds import Dropout
from workers.training.parallel.gradient_reduction import GradientReducer
from workers.training.parallel.mesh import Axis, World
from workers.training.parallel.pipeline.pipedream_tied_embedding import StaleTiedEmbedding
from workers.training.parallel.pipeline.stage_layers import build_parts
from workers.training.parallel.pipeline.tied_embedding import TiedEmbedding
from workers.training.parallel.transforms import BuildContext, apply_transforms

# torch 2.13 renamed the option
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DDP.__init__).parameters
    else "broadcast_buffers"
)
_LOCAL_BUFFERS: dict[str, Any] = {_SYNC_BUFFERS: False}


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's share of the model under its plan: the full model, one part, or several stages.

    `modules` are what a step calls, one per part: the part itself, or DDP around it. Gradient
    reductions average over `averaged` ranks. `tied_embedding` keeps both copies of a pipeline's
    tied embedding equal.
    """

    plan: ParallelPlan
    world: World
    parts: list[Decoder]
    modules: list[nn.Module]
    casts: list[CastCopies]
    averaged: int
    dropout: Dropout
    tied_embedding: TiedEmbedding | None = None
    reducers: tuple[GradientReducer, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` holds the parameters (ZeRO 2, 3)."""
        return self.world.fsdp is not None

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by their names in the unwrapped model; sharded ones are DTensors.

        A tied embedding that two parts of this rank hold is the first part's.
        """
        return _parameters(self.parts)

    def stored_weights(self) -> list[Tensor]:
        """All parameters of this rank, frozen ones included."""
        return [each for part in self.parts for each in part.parameters()]

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors in a checkpoint: parameters and routers' balancing biases."""
        return {
            name: each
            for part in reversed(self.parts)
            for name, each in named_weights(part).items()
        }

    def all_modules(self) -> Iterator[nn.Module]:
        """The modules of all parts."""
        for part in self.parts:
            yield from part.modules()

    @property
    def gradients_appear_reduced(self) -> bool:
        """Whether a gradient is final when autograd accumulates it: nothing reduces it afterwards.

        `fully_shard` accumulates reduced gradients; otherwise this holds on a single rank only.
        """
        alone = self.world.axis("data").size == self.plan.tp == self.plan.pp == 1
        return alone or self.sharded

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the passes of a micro-batch, which is the step's last or not.

        Unsharded gradients stay local until the last one. Sharded ones (ZeRO 2, 3) are reduced to
        shards every time: unsharded over a step, they would take the bytes that these stages save.
        Copies of shards (hybrid sharding) are added on the last one, and ZeRO 2 keeps its weights
        gathered until then, as ZeRO 3 its persistent units. Pipelines do both per micro-batch.
        """
        for reducer in self.reducers:
            reducer.syncing = last
        if self.sharded and self.plan.pp == 1:
            [part] = self.parts
            fsdp: Any = part
            fsdp.set_requires_all_reduce(last)
            if self.plan.zero == 2 and not self.plan.offloads_weights:
                fsdp.set_reshard_after_backward(last)
            elif self.plan.param_persistence_threshold:
                from workers.training.parallel.zero import persistent_units

                for unit in persistent_units(part):
                    unit.set_reshard_after_backward(last, recurse=False)
        no_sync: Any = getattr(self.modules[0], "no_sync", None)
        return nullcontext() if no_sync is None or last else no_sync()

    def finish_gradients(self) -> None:
        """After a step's last backward pass: sum the gradients of tied copies, average unsharded
        ones.
        """
        if self.plan.tp > 1 and not self.sharded:
            from workers.training.parallel.tensor.gradient_sums import sum_partial

            sum_partial(self.parameters().values())
        if self.tied_embedding is not None:
            self.tied_embedding.add_gradients()
        for reducer in self.reducers:
            reducer.finish()

    def finish_update(self) -> None:
        """After an update, or after weights were loaded."""
        if self.tied_embedding is not None:
            self.tied_embedding.copy_weights()

    def replica_axis(self, parameter: Tensor) -> Axis:
        """The ranks that hold copies of a parameter; for routed experts, those with the same
        experts.
        """
        return replica_axis(self.world, parameter)

    def copies_of(self, name: str, parameter: Tensor) -> int:
        """How many ranks of the world hold the same elements of a parameter."""
        tied = self.tied_embedding
        copies = tied.updated_copies(name) if tied is not None else 1
        return copies * self.world.size // (self.plan.pp * shard_count(parameter))

    def release_gathered(self) -> None:
        """Free gathered weights that a forward pass without a backward pass left behind."""
        if self.sharded:
            for module in self.all_modules():
                reshard: Any = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()

    def gathered_weights(self) -> list[Tensor]:
        """Gathered copies of sharded weights, or casts of unsharded ones, that exist now."""
        copies = [copy for casts in self.casts for copy in casts.copies]
        if self.sharded:
            copies += [
                local_tensor(p)
                for part in self.parts
                for p in part.parameters()
                if not _is_shard(p)
            ]
        return copies


def replica_axis(world: World, parameter: Tensor) -> Axis:
    """See `Parallel.replica_axis`."""
    return world.axis("expert_data" if has_mesh_axis(parameter, "ep") else "data")


def parallelize(
    model: ModelSpec,
    plan: ParallelPlan,
    world: World,
    *,
    seed: int,
    compile: bool = False,
    fused: bool = True,
    quantize_aware: str | None = None,
    adapter: AdapterSpec | None = None,
    frozen: Sequence[str] = (),
) -> Parallel:
    """Build this rank's share of `model` on its device; the same initial weights under every plan.

    The options are those of `BuildContext`.
    """
    cpu_operations.enable(not compile)
    if world.device.type == "cpu":
        prefer_onednn()
    with torch.device("meta"):
        parts = build_parts(model, plan, world.axis("pp"))
    context = BuildContext(
        model, plan, world, seed, compile, fused, quantize_aware, adapter, tuple(frozen)
    )
    parts = apply_transforms(parts, context)
    modules, reducers = _data_parallel(parts, plan, world)
    return Parallel(
        plan=plan,
        world=world,
        parts=parts,
        modules=modules,
        casts=[each for part in parts for each in casts_of(part)],
        averaged=world.axis("data").size,
        dropout=_dropout(parts, plan, world, seed),
        tied_embedding=_tied_embedding(model, parts, plan, world),
        reducers=reducers,
    )


def build_frozen(
    model: ModelSpec,
    plan: ParallelPlan,
    world: World,
    *,
    seed: int,
    fused: bool = True,
    adapter: AdapterSpec | None = None,
) -> list[Decoder]:
    """This rank's parts of a second model that is not trained, sharded like the trained one.

    Weights are stored in the plan's compute dtype on the device, without gradients. With `adapter`
    it has the modules and the storage of a model with that adapter.
    """
    resident = plan.model_copy(
        update={"recompute": "none", "offload": "none", "params_dtype": None}
    )
    with torch.device("meta"):
        parts = build_parts(model, resident, world.axis("pp"))
    for part in parts:
        store_weights(part, DTYPES[plan.precision])
    context = BuildContext(
        model, resident, world, seed, fused=fused, adapter=adapter, frozen=("*",) if adapter else ()
    )
    parts = apply_transforms(parts, context)
    return [part.requires_grad_(False).eval() for part in parts]


def _data_parallel(
    parts: list[Decoder], plan: ParallelPlan, world: World
) -> tuple[list[nn.Module], tuple[GradientReducer, ...]]:
    """DDP around the parts if data parallelism is all there is, else own gradient reducers."""
    data = world.axis("data")
    if data.size == 1 or world.fsdp is not None:
        return list(parts), ()
    if data.size == world.size and plan.ep == 1 and _parameters(parts):
        return [_ddp(part, world) for part in parts], ()
    by_axis: dict[str, dict[str, Tensor]] = {}
    for name, parameter in _parameters(parts).items():
        by_axis.setdefault(replica_axis(world, parameter).name, {})[name] = parameter
    reducers = (
        GradientReducer(group, world.axis(axis).group, average_over=data.size)
        for axis, group in by_axis.items()
    )
    return list(parts), tuple(reducers)


def _dropout(parts: list[Decoder], plan: ParallelPlan, world: World, seed: int) -> Dropout:
    place = world.axis("cp").rank * plan.tp
    place += world.axis("tp").rank if plan.sequence_parallel else 0
    return Dropout(parts, seed=seed, place=place)


def _tied_embedding(
    model: ModelSpec, parts: list[Decoder], plan: ParallelPlan, world: World
) -> TiedEmbedding | None:
    embeddings = [part.embed.weight for part in parts if part.embed is not None]
    frozen = bool(embeddings) and not embeddings[0].requires_grad
    if not model.tie_embeddings or plan.pp == 1 or frozen:
        return None
    if plan.schedule == "pipedream":
        return StaleTiedEmbedding(parts, world, plan)
    return TiedEmbedding(parts, world.axis("pp"), plan)


def _parameters(parts: list[Decoder]) -> dict[str, Tensor]:
    return {
        name: each
        for part in reversed(parts)
        for name, each in part.named_parameters()
        if each.requires_grad
    }


def _ddp(decoder: Decoder, world: World) -> nn.Module:
    return DDP(
        decoder,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank drew the same weights from the seed
        **_LOCAL_BUFFERS,  # every rank updates routers' biases by the same global loads
    )


def _is_shard(parameter: Tensor) -> bool:
    """Whether this is a shard of `fully_shard`, and not the gathered parameter."""
    return has_mesh_axis(parameter, "fsdp") or has_mesh_axis(parameter, "efsdp")
