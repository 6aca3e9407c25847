"""ZeRO-1: full parameters are assigned to ranks; the owner updates each and broadcasts it.

Torch 2.13's ZeroRedundancyOptimizer has one process group for all parameters; this one has a group
per parameter and takes DTensors of other mesh axes. Does not depend on update rules.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from workers.metrics.memory import local_tensor
from workers.training.optim.parameter_layout import shard_count
from workers.training.optim.update import ScalingOptimizer

BUCKET_BYTES = 25 << 20
_IN_FLIGHT = 4  # buckets: more do not hide more of the transfers
Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]
Bucket = tuple[int, list[Tensor]]  # owner's rank in the group, its parameters


class Zero1Optimizer(Optimizer):
    """`optim` updates this rank's parameters; `step` then sends all new values to all ranks.

    `process_group`: the ranks that hold the same parameter, None for all; its owner is one of them.
    All ranks of a group, and all ranks that share a DTensor, must pass the same parameters in the
    same order: then all shards of a DTensor have matching owners, and rules that sum over shards
    find their peers.
    """

    def __init__(
        self,
        groups: Groups,
        make: Make,
        *,
        process_group: Callable[[Tensor], dist.ProcessGroup | None] = lambda _: None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        owners = _owners(groups, process_group)
        owned_groups: Groups = [
            {
                **group,
                "params": [
                    each
                    for each in group["params"]
                    if owners[each] == dist.get_rank(process_group(each))
                ],
            }
            for group in groups
        ]
        self.optim = make(owned_groups)
        super().__init__(groups, dict(self.optim.defaults))
        parameters_by_owner: dict[dist.ProcessGroup | None, dict[int, list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for parameter, owner in owners.items():
            parameters_by_owner[process_group(parameter)][owner].append(parameter)
        self._buckets_by_group = {
            group: _interleave(owned, bucket_bytes) for group, owned in parameters_by_owner.items()
        }

    @property
    def accepts_factor(self) -> bool:
        """Whether the rule clips and unscales during the update."""
        return isinstance(self.optim, ScalingOptimizer) and self.optim.accepts_factor

    @property
    def skips_on_device(self) -> bool:
        """Whether the rule decides on the device whether to update."""
        return isinstance(self.optim, ScalingOptimizer) and self.optim.skips_on_device

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, **options: float | Tensor
    ) -> None:
        """Update and exchange; `options` go to the rule: those of `ScalingOptimizer`."""
        copy_group_options(self.param_groups, self.optim.param_groups)
        stepping: Any = self.optim
        stepping.step(**options)
        for group, buckets in self._buckets_by_group.items():
            _send(buckets, group)

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """State of the parameters that this rank owns."""
        return get_optimizer_state(self.optim)

    @property
    def masters(self) -> list[Tensor]:
        """Master weights on the host."""
        return get_master_weights(self.optim)

    def close(self) -> None:
        """Release resources of the inner optimizer."""
        release(self.optim)


def get_optimizer_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """This rank's state by parameter; state on disk as tensors over its file."""
    states = getattr(optimizer, "states", None)
    return cast(dict[Tensor, dict[str, Any]], optimizer.state if states is None else states())


def get_master_weights(optimizer: Optimizer) -> list[Tensor]:
    """Host copies of device weights that an offloaded update keeps."""
    masters: list[Tensor] = getattr(optimizer, "masters", [])
    return masters


def release(optimizer: Optimizer) -> None:
    """Release what an optimizer holds outside its process: scratch space on a disk."""
    close = getattr(optimizer, "close", None)
    if close is not None:
        close()


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each size: largest first, to the least loaded rank (lowest on ties); grows
    `loads`.

    ZeroRedundancyOptimizer's rule; the planner uses it too.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(len(loads)), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def copy_group_options(above: Groups, below: Groups) -> None:
    """Copy learning rates and other options to groups of the same order that hold parts of the
    parameters.
    """
    for whole, part in zip(above, below, strict=True):
        part.update({name: value for name, value in whole.items() if name != "params"})


def elements_per_rank(parameter: Tensor) -> int:
    """Elements of `parameter` per rank, equal on all ranks: ragged shards count as even ones."""
    return -(-parameter.numel() // shard_count(parameter))


def _owners(
    groups: Groups, process_group: Callable[[Tensor], dist.ProcessGroup | None]
) -> dict[Tensor, int]:
    loads: dict[dist.ProcessGroup | None, list[int]] = {}
    owners: dict[Tensor, int] = {}
    for options in groups:
        parameters_by_owner: dict[dist.ProcessGroup | None, list[Tensor]] = defaultdict(list)
        for parameter in options["params"]:
            parameters_by_owner[process_group(parameter)].append(parameter)
        for group, parameters in parameters_by_owner.items():
            load = loads.setdefault(group, [0] * dist.get_world_size(group))
            owners.update(
                zip(
                    parameters,
                    assign_owners([elements_per_rank(each) for each in parameters], load),
                    strict=True,
                )
            )
    return owners


def _interleave(owned: dict[int, list[Tensor]], bucket_bytes: int) -> list[Bucket]:
    """Every owner's first bucket, then every owner's second: all links are busy."""
    by_owner = [
        [(owner, bucket) for bucket in _buckets(parameters, bucket_bytes)]
        for owner, parameters in owned.items()
    ]
    return [each for turn in zip_longest(*by_owner) for each in turn if each is not None]


def _buckets(parameters: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Parameters of one dtype, at most `bucket_bytes` together; larger ones alone."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_dtype[parameter.dtype].append(parameter)
    for parameters_by_owner in by_dtype.values():
        bucket: list[Tensor] = []
        bucket_size = 0
        for parameter in parameters_by_owner:
            size = local_tensor(parameter).nbytes
            if bucket and bucket_size + size > bucket_bytes:
                yield bucket
                bucket, bucket_size = [], 0
            bucket.append(parameter)
            bucket_size += size
        if bucket:
            yield bucket


def _send(buckets: list[Bucket], group: dist.ProcessGroup | None) -> None:
    me = dist.get_rank(group)
    pending: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def finish_oldest() -> None:
        work, flat, tensors = pending.popleft()
        work.wait()
        if tensors:
            for tensor, part in zip(
                tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))

    for owner, parameters in buckets:
        tensors = [local_tensor(each) for each in parameters]
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat, tensors = tensors[0], []  # no copy
        elif owner == me:
            flat, tensors = torch.cat([each.reshape(-1) for each in tensors]), []
        else:
            flat = tensors[0].new_empty(sum(each.numel() for each in tensors))
        pending.append(
            (dist.broadcast(flat, group_src=owner, group=group, async_op=True), flat, tensors)
        )
        if len(pending) == _IN_FLIGHT:
            finish_oldest()
    while pending:
        finish_oldest()
