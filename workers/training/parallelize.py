"""One plan object drives torch's own data parallelism: DDP, ZeroRedundancyOptimizer's DDP, `fully_shard`.

Order: build on meta, shard, materialise, initialise, cast, recompute, copy. Does not know optimizers, data or steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from workers.contracts.model import ModelSpec
from workers.contracts.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.models.shapes import weights_of
from workers.training.mesh import World
from workers.training.precision import CastUnits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed the switch
_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in signature(DDP.__init__).parameters else "broadcast_buffers"
_LOCAL_BUFFERS: dict[str, Any] = {_SYNC: False}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class Parallel:
    """The model under its plan. `module` is what a step calls; `replicas` ranks hold the same gradients."""

    module: nn.Module
    decoder: Decoder
    plan: ParallelPlan
    replicas: int
    casts: CastUnits | None

    @property
    def sharded(self) -> bool:
        return self.module is self.decoder and self.plan.zero >= 2 and self.plan.dp > 1

    def parameters(self) -> dict[str, Tensor]:
        """By the names they have in an unwrapped model, whatever the plan; sharded ones are DTensors."""
        return dict(self.decoder.named_parameters())

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model: the parameters, and routers' balancing biases."""
        return weights_of(self.decoder)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around a micro-batch that is not the step's last.

        Whole gradients stay local until the last one. Sharded ones (ZeRO 2, 3) are reduced every time: keeping them
        whole over a step would hold exactly the bytes that these stages are there to save.
        """
        no_sync: Any = getattr(self.module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def release_gathered(self) -> None:
        """Free whole copies of sharded weights that a forward pass without a backward pass left behind."""
        if self.sharded:
            for module in self.decoder.modules():
                reshard: Any = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()

    def gathered_weights(self) -> list[Tensor]:
        """Whole copies of sharded weights, or casts of whole ones, that exist at this moment."""
        copies = list(self.casts.copies) if self.casts else []
        if self.sharded:
            copies += [p.detach() for p in self.decoder.parameters() if not hasattr(p, "to_local")]
        return copies


def parallelize(model: ModelSpec, plan: ParallelPlan, world: World, *, seed: int) -> Parallel:
    """Build `model` on this rank's device under `plan`, initialised from `seed` alike under every plan."""
    with torch.device("meta"):
        decoder = Decoder(model)
    if world.mesh is not None:
        shard(decoder, plan, world.mesh)
    decoder.to_empty(device=world.device)
    initialise(decoder, layers=model.layers, seed=seed)
    casts = _compute_dtype(decoder, plan, world)
    if plan.recompute == "full":
        _recompute(decoder)
    module: nn.Module = decoder
    if world.size > 1 and world.mesh is None:
        module = _copied(decoder, world)
    replicas = (plan.dp_replicate or 1) if world.mesh is not None else world.size
    return Parallel(module, decoder, plan, replicas, casts)


def shard(decoder: Decoder, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """`fully_shard` each block, then what surrounds them. ZeRO-2 keeps weights whole from forward to backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # rope's tables stay fp32
    if plan.precision != "fp32":
        reduce_dtype = DTYPES[plan.reduce_dtype or "fp32"]
        policy = MixedPrecisionPolicy(DTYPES[plan.precision], reduce_dtype, cast_forward_inputs=False)
    reshard = plan.zero == 3
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if decoder.head is not None:
        # the head's weights are used last in the forward and first in the backward pass: no point in freeing between
        fully_shard([decoder.norm, decoder.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(decoder.embed, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    ahead = plan.prefetch_layers
    if ahead:
        sharded: list[Any] = list(decoder.blocks)
        for index, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])


def _compute_dtype(decoder: Decoder, plan: ParallelPlan, world: World) -> CastUnits | None:
    if plan.precision == "fp32" or world.mesh is not None:
        return None
    return CastUnits(decoder, decoder.blocks, DTYPES[plan.precision])


def _recompute(decoder: Decoder) -> None:
    """Keep only each block's input and run the block again in the backward pass (arXiv 1604.06174).

    Wraps the forward method, not the module, so that parameters keep their names.
    """
    from torch.utils.checkpoint import checkpoint

    for block in decoder.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _copied(decoder: Decoder, world: World) -> nn.Module:
    return DDP(
        decoder,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank drew the same weights from the seed
        **_LOCAL_BUFFERS,  # every rank moves routers' biases by the same global loads
    )
