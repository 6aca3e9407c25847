"""Expert parallelism: each rank of an axis holds some experts of every layer; an all-to-all moves
tokens to their experts and back.

Does not depend on routing, losses or steps. Shapes: A assignments of tokens to experts, E experts,
L of them on this rank.
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
    """Distribute each layer's experts over the ranks of `axis`, in order; in place, on meta or with
    weights.

    Their parameters become DTensors on `mesh`: that of `axis`, or (axis, tensor-parallel axis) if
    `apply_tensor` has sharded them. All ranks of the axis must call the decoder equally often.
    """
    assert axis.group is not None
    for layer in _routed_layers(decoder):
        if mesh.ndim == 1:
            style = Region({}, other=sharded(0))
            sharded_experts = parallelize_module(layer.experts, mesh, style, src_data_rank=None)
            layer.register_module("experts", sharded_experts)
        else:
            _distribute_shards(layer.experts, axis, mesh)
        layer.experts.exchange = TokenExchange(layer.experts, axis.group)


def shard_experts(decoder: Decoder, mesh: DeviceMesh, *, average_over: int, **options: Any) -> None:
    """`fully_shard` the experts over the ranks that hold the same ones, before their block is
    sharded over all ranks.

    Their gradients are sums over the tokens of all ranks, of which `mesh` has a part: they are
    divided by `average_over` like the other parameters', whatever the size of the group
    (pytorch#160285).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    alone = mesh.size(mesh.ndim - 1) == 1
    policy = options["mp_policy"]
    # torch 2.13 divides fp16 sums twice if one rank holds everything, and nothing is scattered
    if alone:
        options["mp_policy"] = MixedPrecisionPolicy(
            policy.param_dtype, policy.param_dtype and torch.float32, cast_forward_inputs=False
        )
    for layer in _routed_layers(decoder):
        shards: Any = fully_shard(layer.experts, mesh=mesh, **options)
        shards.set_gradient_divide_factor(average_over)
        if not alone:  # gloo has no sums with a factor
            shards.set_force_sum_reduction_for_comms(True)


class TokenExchange:
    """An `Experts`' `exchange`: rank r of a group holds experts r · L to (r + 1) · L - 1.

    Counts are exchanged first, 4 · E bytes per rank, then hidden states, and as many return
    (GShard, arXiv 2006.16668, section 3.2). Gradients take the reverse path. An expert without
    tokens computes with zero rows, and so gets a gradient of zeros.

    The host must know the counts to send exactly the assigned rows, and waits for the device in
    each layer. On a GPU it does not if a capacity bounds the rows of an expert: then each expert
    gets that many from each rank, padded with zeros, and no counts are sent.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        self.experts, self.group, self.ranks = experts, group, group.size()

    def __call__(self, sorted_x: Tensor, counts_E: Tensor, most: int | None = None) -> Tensor:
        """`sorted_x` `[A, hidden]` by expert → outputs, of the first rows at least.

        `most`: rows that no expert exceeds on any rank of the group, if known.
        """
        if most is not None and _avoids_waiting(sorted_x.device):
            return self._padded(sorted_x, counts_E, most)
        mine_E = counts_E.int()
        received_E = all_to_all_single(mine_E, None, None, self.group)
        counts = torch.stack((mine_E, received_E)).view(2, self.ranks, -1)
        sent, received = counts.tolist()  # [rank][its expert], [rank][expert here]
        send_sizes, receive_sizes = [sum(row) for row in sent], [sum(row) for row in received]
        arrived = all_to_all_single_autograd(
            sorted_x[: sum(send_sizes)], receive_sizes, send_sizes, self.group
        )
        by_expert = [list(column) for column in zip(*received, strict=True)]
        grouped = _transpose_runs(arrived, received)
        done = self.experts.mlp(grouped, counts[1].sum(0), [sum(row) for row in by_expert])
        return all_to_all_single_autograd(
            _transpose_runs(done, by_expert), send_sizes, receive_sizes, self.group
        )

    def _padded(self, sorted_x: Tensor, counts_E: Tensor, most: int) -> Tensor:
        """All assignments' outputs `[A, hidden]`, zeros for dropped ones; sizes do not depend on
        data.
        """
        rows, width = sorted_x.shape
        here = len(counts_E) // self.ranks
        ends_E = counts_E.cumsum(0)
        starts_E = ends_E - counts_E
        slot_C = torch.arange(most, device=sorted_x.device)
        place_EC = (starts_E[:, None] + slot_C).clamp(max=rows - 1)
        filled_EC = slot_C < counts_E[:, None]
        # an unfilled slot reads some row, whose gradient gets a zero more
        slots = sorted_x.index_select(0, place_EC.flatten()) * filled_EC.flatten()[:, None]
        sizes = [here * most] * self.ranks
        arrived = all_to_all_single_autograd(slots, sizes, sizes, self.group)
        by_expert = arrived.view(self.ranks, here, most, width).transpose(0, 1)
        count = self.ranks * most
        counts = torch.full((here,), count, dtype=torch.int64, device=sorted_x.device)
        done = self.experts.mlp(by_expert.reshape(-1, width), counts, [count] * here)
        by_rank = done.view(here, self.ranks, most, width).transpose(0, 1).reshape(-1, width)
        returned = all_to_all_single_autograd(by_rank, sizes, sizes, self.group)
        row_A = torch.arange(rows, device=sorted_x.device)
        expert_A = torch.searchsorted(ends_E, row_A, right=True)
        assigned_A = expert_A < len(counts_E)
        expert_A = expert_A.clamp(max=len(counts_E) - 1)
        slot_A = expert_A * most + (row_A - starts_E[expert_A]).clamp(max=most - 1)
        return returned.index_select(0, slot_A) * assigned_A[:, None]


def _avoids_waiting(device: torch.device) -> bool:
    """Whether padded messages cost less than the host's wait for counts."""
    return device.type == "cuda"


def _transpose_runs(rows: Tensor, counts: list[list[int]]) -> Tensor:
    """Reorder runs of `counts[i][j]` rows from order (i, j) to order (j, i)."""
    runs = torch.split(rows, [count for row in counts for count in row])
    width = len(counts[0])
    return torch.cat([run for first in range(width) for run in runs[first::width]])


def _distribute_shards(experts: Experts, axis: Axis, mesh: DeviceMesh) -> None:
    """Keep the tensor-parallel shards of this rank's experts."""
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded_parameter: Any = parameter
            local = local_tensor(parameter).chunk(axis.size)[axis.rank].contiguous()
            distributed = DTensor.from_local(
                local,
                mesh,
                [Shard(0), *sharded_parameter.placements],
                run_check=False,
                shape=sharded_parameter.shape,
                stride=sharded_parameter.stride(),
            )
            module.register_parameter(name, nn.Parameter(distributed))


def _routed_layers(decoder: Decoder) -> Iterator[RoutedMlp]:
    for block in decoder.blocks.values():
        if isinstance(block.mlp, RoutedMlp):
            yield block.mlp
