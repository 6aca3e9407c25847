"""Expert parallelism: each rank of an axis holds some experts of every layer, tokens travel to
theirs and back.

Between the router and the weighted sum of what the experts answer; neither sees any of it. Does not
know how tokens
were routed, losses or steps. Shapes: A assignments of tokens to experts at hand, E experts, L of
them on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from workers.metrics.memory import local_tensor
from workers.models.decoder import Decoder
from workers.models.moe.experts import Experts
from workers.models.moe.layer import RoutedMlp
from workers.training.parallel.mesh import Axis
from workers.training.parallel.tensor.region import Region, sharded


def apply_expert(decoder: Decoder, axis: Axis, mesh: DeviceMesh) -> None:
    """Deal each layer's experts out to the ranks of `axis`, in order; in place, before weights are
    there or after.

    Their parameters become DTensors on `mesh`: that of `axis` alone, or with the tensor-parallel
    axis after it where
    `apply_tensor` has laid them over that. All ranks of the axis have to call the decoder equally
    often.
    """
    assert axis.group is not None
    for experts in _experts_of(decoder):
        if mesh.ndim == 1:
            parallelize_module(experts, mesh, Region({}, other=sharded(0)), src_data_rank=None)
        else:
            _deal_shards(experts, axis, mesh)
        experts.through = Exchange(experts, axis.group)


def shard_experts(decoder: Decoder, mesh: DeviceMesh, *, average_over: int, **how: Any) -> None:
    """`fully_shard` the experts over the ranks that hold the same ones, before their block is over
    all ranks.

    Their gradients are sums over the tokens of all ranks, of which those in `mesh` are a part:
    divided by
    `average_over`, as the other parameters' means are, whatever the size of the group
    (pytorch#160285).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    alone = mesh.size(mesh.ndim - 1) == 1
    policy = how["mp_policy"]
    # torch 2.13 divides fp16 sums twice where one rank holds all; there is nothing to scatter in
    # fewer bytes
    if alone:
        how["mp_policy"] = MixedPrecisionPolicy(
            policy.param_dtype, policy.param_dtype and torch.float32, cast_forward_inputs=False
        )
    for experts in _experts_of(decoder):
        shards: Any = fully_shard(experts, mesh=mesh, **how)
        shards.set_gradient_divide_factor(average_over)
        if not alone:  # gloo knows no sums with a factor
            shards.set_force_sum_reduction_for_comms(True)


class Exchange:
    """An `Experts`' `through`, over the ranks of a group: rank r holds experts r · L to (r + 1) · L
    - 1.

    Counts go first, 4 · E bytes a rank, then the assignments' hidden states, and as many come back
    (GShard, arXiv
    2006.16668, section 3.2). Gradients take the same ways in the other direction. An expert without
    a token computes
    with none, and so gets a gradient of zeros.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        self.experts, self.group, self.ranks = experts, group, group.size()

    def __call__(self, sorted_x: Tensor, counts_E: Tensor) -> Tensor:
        """`sorted_x` `[A, hidden]` by expert, rows beyond the sum of `counts_E` dropped; outputs of
        the others.
        """
        mine_E = counts_E.int()
        theirs_E = all_to_all_single(mine_E, None, None, self.group)
        both = torch.stack((mine_E, theirs_E)).view(2, self.ranks, -1)
        sent, came = both.tolist()  # [rank][expert of it], [rank][expert held here]
        give, take = [sum(row) for row in sent], [sum(row) for row in came]
        arrived = all_to_all_single_autograd(sorted_x[: sum(give)], take, give, self.group)
        by_expert = [list(column) for column in zip(*came, strict=True)]
        mixed = _turned(arrived, came)
        done = self.experts.mlp(mixed, both[1].sum(0), [sum(row) for row in by_expert])
        return all_to_all_single_autograd(_turned(done, by_expert), give, take, self.group)


def _turned(rows: Tensor, counts: list[list[int]]) -> Tensor:
    """Runs of `counts[i][j]` rows, i by i and in each j by j, put in order j by j and in each i by
    i.
    """
    pieces = torch.split(rows, [count for row in counts for count in row])
    width = len(counts[0])
    return torch.cat([piece for first in range(width) for piece in pieces[first::width]])


def _deal_shards(experts: Experts, axis: Axis, mesh: DeviceMesh) -> None:
    """Of each expert's tensor-parallel shards, those of this rank's experts."""
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            lying: Any = parameter
            local = local_tensor(parameter).chunk(axis.size)[axis.rank].contiguous()
            dealt = DTensor.from_local(
                local,
                mesh,
                [Shard(0), *lying.placements],
                run_check=False,
                shape=lying.shape,
                stride=lying.stride(),
            )
            module.register_parameter(name, nn.Parameter(dealt))


def _experts_of(decoder: Decoder) -> Iterator[Experts]:
    for block in decoder.blocks.values():
        if isinstance(block.mlp, RoutedMlp):
            yield block.mlp.experts
