"""ZeRO 2 and 3 and weight offloading by torch's `fully_shard`.

Does not depend on optimizers or steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workers.contracts.specs.plan import SPLIT_BACKWARD, ParallelPlan
from workers.models.decoder import Decoder
from workers.training.numerics.precision import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_decoder(
    decoder: Decoder, plan: ParallelPlan, mesh: DeviceMesh, *, experts: DeviceMesh | None = None
) -> None:
    """`fully_shard` each block, then the rest. ZeRO-2 keeps weights gathered from forward to
    backward.

    `experts`: the mesh that expert-parallel routed experts are sharded over.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    offload = OffloadPolicy()
    if plan.offloads_weights:
        # pinned memory is for a GPU
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # rope's tables stay fp32
    if plan.precision != "fp32":
        reduce_dtype = DTYPES[plan.reduce_dtype or "fp32"]
        policy = MixedPrecisionPolicy(
            DTYPES[plan.precision], reduce_dtype, cast_forward_inputs=False
        )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    # resharded between the halves of a split backward pass, weights would lose their gradients
    reshard = (plan.zero == 3 or plan.offloads_weights) and not (
        plan.pp > 1 and plan.schedule in SPLIT_BACKWARD
    )
    if experts is not None:
        from workers.training.parallel.expert import shard_experts

        shard_experts(
            decoder,
            **{**options, "mesh": experts},
            average_over=plan.dp * plan.cp,
            reshard_after_forward=reshard,
        )
    for block in decoder.blocks.values():
        fully_shard(block, **options, reshard_after_forward=reshard)
    if decoder.head is not None and decoder.norm is not None:
        # the head's weights are used last in the forward and first in the backward pass
        fully_shard([decoder.norm, decoder.head], **options, reshard_after_forward=False)
    if decoder.embed is not None and not decoder.spec.tie_embeddings:
        fully_shard(decoder.embed, **options, reshard_after_forward=reshard)
    fully_shard(decoder, **options, reshard_after_forward=False)
    ahead = plan.prefetch_layers
    if ahead:
        sharded: list[Any] = list(decoder.blocks.values())
        for index, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
