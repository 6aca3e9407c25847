"""One plan object drives torch's own parallelism: pipeline parts, tensor shards, DDP, ZeRO by
`fully_shard`.

Order: build on meta, cut into parts, compile, shard, materialise, initialise, cast, recompute,
copy. Does not know
optimizers, data or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import SPLIT_BACKWARD, ParallelPlan
from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.metrics.memory import local_tensor
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.models.layers.operations import make_plain
from workers.models.qat import fake_quantise
from workers.models.weights.parameter_shapes import weights_of
from workers.training.fp8 import apply_fp8
from workers.training.numerics.cpu_products import prefer_onednn
from workers.training.numerics.precision import CastUnits
from workers.training.optim.parameter_layout import lies_over, shards_of
from workers.training.parallel.context.apply import apply_context
from workers.training.parallel.gradient_reduction import GradientReducer
from workers.training.parallel.mesh import Axis, World
from workers.training.parallel.pipeline.pipedream_tied_embedding import StaleTies
from workers.training.parallel.pipeline.stage_layers import parts_of
from workers.training.parallel.pipeline.tied_embedding import Ties
from workers.training.parallel.sharded_dropout import Dropout
from workers.training.recompute import apply_recompute

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed the switch
_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DDP.__init__).parameters
    else "broadcast_buffers"
)
_LOCAL_BUFFERS: dict[str, Any] = {_SYNC: False}
# what is computed with; of fp8, all but the linear layers of blocks
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


@dataclass(slots=True)
class Parallel:
    """What this rank holds of the model under its plan: the whole, one part of it, or a pipeline
    stage's several.

    `modules` are what a step calls, one a part: the part itself, or DDP around it. Gradient
    reductions average over
    `averaged` ranks. `ties` keeps the two ends of a pipeline with a tied embedding equal.
    """

    plan: ParallelPlan
    world: World
    parts: list[Decoder]
    modules: list[nn.Module]
    casts: list[CastUnits]
    averaged: int
    dropout: Dropout
    ties: Ties | None = None
    reducers: tuple[GradientReducer, ...] = ()
    # told before the passes of a micro-batch whether the gradients that they make are those of the
    # update
    follow: Callable[[bool], None] = lambda final: None

    @property
    def sharded(self) -> bool:
        return self.world.fsdp is not None

    def parameters(self) -> dict[str, Tensor]:
        """By the names they have in an unwrapped whole model, whatever the plan; sharded ones are
        DTensors.

        Where two parts of this rank hold one tensor (a tied embedding at both ends of a pipeline),
        the first one's.
        """
        return {
            name: each for part in reversed(self.parts) for name, each in part.named_parameters()
        }

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model: the parameters, and routers' balancing biases."""
        return {
            name: each for part in reversed(self.parts) for name, each in weights_of(part).items()
        }

    def modules_of_all_parts(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()

    def backward_of(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the passes of a micro-batch, which is the step's last or not.

        Whole gradients stay local until the last one. Sharded ones (ZeRO 2, 3) are reduced every
        time: keeping them
        whole over a step would hold exactly the bytes that these stages are there to save.
        """
        for reducer in self.reducers:
            reducer.syncing = last
        # `fully_shard` tells of a gradient when it is reduced, all others before
        alone = self.world.axis("data").size == self.plan.tp == self.plan.pp == 1
        self.follow(last and (alone or self.sharded))
        no_sync: Any = getattr(self.modules[0], "no_sync", None)
        return nullcontext() if no_sync is None or last else no_sync()

    def finish_gradients(self) -> None:
        """After a step's last backward pass: tied copies get the sum of their gradients, whole ones
        their mean.
        """
        if self.plan.tp > 1 and not self.sharded:
            from workers.training.parallel.tensor.gradient_sums import sum_partial

            sum_partial(self.parameters().values())
        if self.ties is not None:
            self.ties.add_gradients()
        for reducer in self.reducers:
            reducer.finish()

    def finish_update(self) -> None:
        """After an update, or after weights came from elsewhere."""
        if self.ties is not None:
            self.ties.copy_weights()

    def copies(self, parameter: Tensor) -> Axis:
        """The ranks among which copies of a parameter are kept equal: of routed experts, those with
        the same ones.
        """
        return self.world.axis("expert_data" if lies_over(parameter, "ep") else "data")

    def holders(self, name: str, parameter: Tensor) -> int:
        """How many ranks of the world hold the same numbers of a parameter."""
        ends = self.ties.ends(name) if self.ties is not None else 1
        return ends * self.world.size // (self.plan.pp * shards_of(parameter))

    def release_gathered(self) -> None:
        """Free whole copies of sharded weights that a forward pass without a backward pass left
        behind.
        """
        if self.sharded:
            for module in self.modules_of_all_parts():
                reshard: Any = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()

    def gathered_weights(self) -> list[Tensor]:
        """Whole copies of sharded weights, or casts of whole ones, that exist at this moment."""
        copies = [copy for casts in self.casts for copy in casts.copies]
        if self.sharded:
            copies += [
                local_tensor(p)
                for part in self.parts
                for p in part.parameters()
                if not _is_shard(p)
            ]
        return copies


def parallelize(
    model: ModelSpec,
    plan: ParallelPlan,
    world: World,
    *,
    seed: int,
    compiled: bool = False,
    fused: bool = True,
    aware: str | None = None,
) -> Parallel:
    """Build this rank's part of `model` on its device under `plan`, initialised from `seed` alike
    under every plan.

    `compiled`: blocks go through torch.compile. Not `fused`: they compute step by step, as formulas
    are written.
    `aware`: with weights rounded to that kind, in groups as the whole model's are made when they
    are kept so.
    """
    if world.device.type == "cpu":
        prefer_onednn()
    with torch.device("meta"):
        parts = parts_of(model, plan, world.axis("pp"))
    for part in () if fused else parts:
        make_plain(part)
    for part in parts if compiled else ():
        # takes torch's compiler seconds to load
        from workers.training.setup.compile import apply_compile

        apply_compile(part, plan)
    lay(parts, plan, world)
    for part in parts:
        _materialise(part, plan, world.device)
        initialise(part, layers=model.layers, seed=seed)
    casts = []
    if plan.precision != "fp32" and world.fsdp is None:
        casts = [CastUnits(part, part.blocks, DTYPES[plan.precision]) for part in parts]
    if plan.precision == "fp8":
        for part in parts:
            apply_fp8(part, handed_on=plan.tp == 1)
    for part in parts:
        if aware is not None:
            fake_quantise(part, aware, group=group_for(linear_widths(model)))
        apply_context(part, world.axis("cp"))
        if compiled:
            from workers.training.setup.compile import keep_apart

            keep_apart(part, always=plan.cp > 1)
        if not (compiled and plan.recompute == "selective"):  # that is compiled with the blocks
            apply_recompute(part, plan.recompute)
    data = world.axis("data")
    modules: list[nn.Module] = list(parts)
    copied = data.size > 1 and world.fsdp is None
    if copied and data.size == world.size and plan.ep == 1:
        modules = [_copied(part, world) for part in parts]
        copied = False
    place = world.axis("cp").rank * plan.tp + (
        world.axis("tp").rank if plan.sequence_parallel else 0
    )
    dropout = Dropout(parts, seed=seed, place=place)
    ties: Ties | None = None
    if model.tie_embeddings and plan.pp > 1:
        kind = StaleTies if plan.schedule == "pipedream" else Ties
        ties = kind(parts, world.axis("pp"), plan)
    parallel = Parallel(plan, world, parts, modules, casts, data.size, dropout, ties)
    if copied:
        alike: dict[str, dict[str, Tensor]] = {}
        for name, parameter in parallel.parameters().items():
            alike.setdefault(parallel.copies(parameter).name, {})[name] = parameter
        parallel.reducers = tuple(
            GradientReducer(some, world.axis(axis).group, average_over=data.size)
            for axis, some in alike.items()
        )
    return parallel


def lay(parts: list[Decoder], plan: ParallelPlan, world: World) -> None:
    """Shard the parameters of meta-built parts as the plan says."""
    tensor = world.axis("tp")
    for part in parts:
        if tensor.mesh is not None:
            # DTensor's package takes a second to load
            from workers.training.parallel.tensor import apply_tensor

            apply_tensor(part, plan, tensor.mesh)
        if world.experts is not None:
            from workers.training.parallel.expert import apply_expert

            apply_expert(part, world.axis("ep"), world.experts)
        if world.fsdp is not None:
            shard(part, plan, world.fsdp, experts=world.expert_fsdp)


def shard(
    decoder: Decoder, plan: ParallelPlan, mesh: DeviceMesh, *, experts: DeviceMesh | None = None
) -> None:
    """`fully_shard` each block, then what surrounds them. ZeRO-2 keeps weights whole from forward
    to backward.

    `experts`: the mesh of routed experts that lie over ranks already.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    away = OffloadPolicy()
    if plan.offloads_weights:
        # there is nothing to pin for without one
        away = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # rope's tables stay fp32
    if plan.precision != "fp32":
        reduce_dtype = DTYPES[plan.reduce_dtype or "fp32"]
        policy = MixedPrecisionPolicy(
            DTYPES[plan.precision], reduce_dtype, cast_forward_inputs=False
        )
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": away}
    # resharded between the halves of a split backward pass, weights would lose their gradients
    reshard = (plan.zero == 3 or plan.offloads_weights) and not (
        plan.pp > 1 and plan.schedule in SPLIT_BACKWARD
    )
    if experts is not None:
        from workers.training.parallel.expert import shard_experts

        shard_experts(
            decoder,
            **{**how, "mesh": experts},
            average_over=plan.dp * plan.cp,
            reshard_after_forward=reshard,
        )
    for block in decoder.blocks.values():
        fully_shard(block, **how, reshard_after_forward=reshard)
    if decoder.head is not None and decoder.norm is not None:
        # the head's weights are used last in the forward and first in the backward pass: no point
        # in freeing between
        fully_shard([decoder.norm, decoder.head], **how, reshard_after_forward=False)
    if decoder.embed is not None and not decoder.spec.tie_embeddings:
        fully_shard(decoder.embed, **how, reshard_after_forward=reshard)
    fully_shard(decoder, **how, reshard_after_forward=False)
    ahead = plan.prefetch_layers
    if ahead:
        sharded: list[Any] = list(decoder.blocks.values())
        for index, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])


def _materialise(part: Decoder, plan: ParallelPlan, device: torch.device) -> None:
    """Memory for all that a meta-built part holds: on `device`, but for weights that are offloaded."""
    if not plan.offloads_weights:
        part.to_empty(device=device)
        return
    part.to_empty(device="cpu")
    for module in part.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _copied(decoder: Decoder, world: World) -> nn.Module:
    return DDP(
        decoder,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank drew the same weights from the seed
        **_LOCAL_BUFFERS,  # every rank moves routers' biases by the same global loads
    )


def _is_shard(parameter: Tensor) -> bool:
    """Whether this is `fully_shard`'s own shard, and not the whole (or the tensor-parallel shard)
    it gathered.
    """
    return lies_over(parameter, "fsdp") or lies_over(parameter, "efsdp")
