"""ZeRO 2 and 3 and weight offloading by torch's `fully_shard`.

ZeRO 3 may keep some units (blocks, token table) gathered: `Gathering`. Does not depend on
optimizers or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workers.contracts.specs.plan import SPLIT_BACKWARD, ParallelPlan
from workers.metrics.memory import local_tensor
from workers.models.decoder import Decoder
from workers.training.numerics.precision import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_PERSISTENT = "stays_gathered"  # an attribute of units


@dataclass(frozen=True, slots=True)
class Gathering:
    """Which units of a part stay gathered: `live` from forward to backward pass, `persistent` until
    the update.

    DeepSpeed's stage3_max_live_parameters and stage3_param_persistence_threshold; its units are
    single parameters, here a unit is what one all-gather fetches.
    """

    live: frozenset[nn.Module] = frozenset()
    persistent: frozenset[nn.Module] = frozenset()


def choose_gathered(decoder: Decoder, plan: ParallelPlan) -> Gathering:
    """The units of a part before sharding that `max_live_params` and
    `param_persistence_threshold` keep gathered.

    Counts this rank's parameters under tensor parallelism. The last blocks of the forward pass are
    the first of the backward pass: they stay as long as they, the head and the blocks that are
    gathered at a time fit.
    """
    blocks = list(decoder.blocks.values())
    tied = decoder.spec.tie_embeddings
    table = None if decoder.embed is None or tied else decoder.embed
    units: list[nn.Module] = [*blocks, *([] if table is None else [table])]
    threshold = plan.param_persistence_threshold or 0
    persistent = frozenset(unit for unit in units if _size(unit) < threshold)
    if plan.max_live_params is None:
        return Gathering(persistent, persistent)
    ahead = 1 + (1 if plan.prefetch_layers is None else plan.prefetch_layers)
    largest = max(map(_size, blocks), default=0)
    rest = _size(decoder) - sum(map(_size, units))
    room = plan.max_live_params // plan.virtual_stages - rest - ahead * largest
    live = set(persistent)
    room -= sum(map(_size, live))
    for block in reversed(blocks):
        if block not in live:
            room -= _size(block)
            if room < 0:
                break
            live.add(block)
    return Gathering(frozenset(live), persistent)


def _size(unit: nn.Module) -> int:
    return sum(local_tensor(each).numel() for each in unit.parameters())


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
    gathering = choose_gathered(decoder, plan) if reshard else Gathering()
    for block in decoder.blocks.values():
        fully_shard(block, **options, reshard_after_forward=reshard and block not in gathering.live)
    if decoder.head is not None and decoder.norm is not None:
        # the head's weights are used last in the forward and first in the backward pass
        fully_shard([decoder.norm, decoder.head], **options, reshard_after_forward=False)
    if decoder.embed is not None and not decoder.spec.tie_embeddings:
        live = decoder.embed in gathering.live
        fully_shard(decoder.embed, **options, reshard_after_forward=reshard and not live)
    fully_shard(decoder, **options, reshard_after_forward=False)
    for unit in gathering.persistent:
        setattr(unit, _PERSISTENT, True)
    if plan.prefetch_layers is not None:
        _set_prefetch(decoder, plan.prefetch_layers, on_cpu=mesh.device_type == "cpu")


def persistent_units(decoder: nn.Module) -> list[Any]:
    """The sharded units that stay gathered until the update."""
    return [unit for unit in decoder.modules() if getattr(unit, _PERSISTENT, False)]


def _set_prefetch(decoder: Decoder, ahead: int, *, on_cpu: bool) -> None:
    """Gather this many units ahead, in both passes.

    Without a setting `fully_shard` gathers one ahead in the backward pass, and in the forward pass
    as far as the host runs ahead of the device: 0 makes the host wait before each gather.
    """
    sharded: list[Any] = list(decoder.blocks.values())
    if decoder.norm is not None and decoder.head is not None and not decoder.spec.tie_embeddings:
        sharded.append(decoder.norm)
    for index, unit in enumerate(sharded):
        if ahead:
            unit.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
            # a head's backward pass comes first, and is followed by the last blocks
            unit.set_modules_to_backward_prefetch(sharded[max(0, index - ahead) : index][::-1])
        else:
            # gathering itself again does nothing, but replaces the default
            unit.set_modules_to_backward_prefetch([unit])
            if not on_cpu:
                unit.register_forward_pre_hook(_wait_for_device, prepend=True)


def _wait_for_device(*_: object) -> None:
    torch.accelerator.synchronize()
