"""ZeRO-1: whole parameters dealt to the ranks of a group, each updated by its owner, who sends it
to the others.

What torch's ZeroRedundancyOptimizer does, over any group of ranks, for plain tensors and DTensors
of another mesh axis.
Knows no update rule.
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
from workers.training.optim.parameter_layout import shards_of

BUCKET_BYTES = 25 << 20
_IN_FLIGHT = 4  # buckets: more hide no more of a transfer, each costs its bytes
Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]
Bucket = tuple[int, list[Tensor]]  # owner's rank in the group, its parameters


class SplitOptimizer(Optimizer):
    """`optim` updates what this rank owns; `step` then makes all ranks hold all new values.

    `among`: the ranks that hold the same parameter, None for all; a parameter is dealt among those
    of its group. All
    ranks of a group, and all ranks that share a DTensor, must call with the same parameters in the
    same order: then
    the same part of every DTensor's ranks updates it, and rules that sum over its shards find each
    other.
    """

    def __init__(
        self,
        groups: Groups,
        make: Make,
        *,
        among: Callable[[Tensor], dist.ProcessGroup | None] = lambda _: None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        owners = _owners(groups, among)
        mine: Groups = [
            {
                **group,
                "params": [
                    each for each in group["params"] if owners[each] == dist.get_rank(among(each))
                ],
            }
            for group in groups
        ]
        self.optim = make(mine)
        super().__init__(groups, dict(self.optim.defaults))
        alike: dict[dist.ProcessGroup | None, dict[int, list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for parameter, owner in owners.items():
            alike[among(parameter)][owner].append(parameter)
        self._sent = {group: _in_turn(owned, bucket_bytes) for group, owned in alike.items()}

    @property
    def takes_factor(self) -> bool:
        return bool(getattr(self.optim, "takes_factor", False))

    @torch.no_grad()
    def step(self, closure: None = None, **how: float) -> None:  # type: ignore[override]
        """`how` is for the rule: a `factor` where it `takes_factor`."""
        hand_down(self.param_groups, self.optim.param_groups)
        stepping: Any = self.optim
        stepping.step(**how)
        for group, buckets in self._sent.items():
            _send(buckets, group)

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """Of the parameters that this rank owns."""
        return state_of(self.optim)

    @property
    def masters(self) -> list[Tensor]:
        return masters_of(self.optim)

    def close(self) -> None:
        release(self.optim)


def state_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """State by parameter, of this rank's part.

    Where states lie on a disk, tensors over its file.
    """
    states = getattr(optimizer, "states", None)
    return cast(dict[Tensor, dict[str, Any]], optimizer.state if states is None else states())


def masters_of(optimizer: Optimizer) -> list[Tensor]:
    """Copies of weights that an offloaded update keeps on the host beside those on the device."""
    found: list[Tensor] = getattr(optimizer, "masters", [])
    return found


def release(optimizer: Optimizer) -> None:
    """Give back what an optimizer holds outside of its process: scratch space on a disk."""
    close = getattr(optimizer, "close", None)
    if close is not None:
        close()


def deal(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each size: largest first to the least loaded rank (the first of equals); `loads`
    grow by it.

    ZeroRedundancyOptimizer's rule; the planner counts by it too.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = min(range(len(loads)), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def hand_down(above: Groups, below: Groups) -> None:
    """Learning rates and other options of parameter groups, to groups of the same order that hold
    parts of them.
    """
    for whole, part in zip(above, below, strict=True):
        part.update({name: value for name, value in whole.items() if name != "params"})


def share_of(parameter: Tensor) -> int:
    """Numbers of `parameter` on a rank, the same on every rank: a ragged shard counts as an even
    one.
    """
    return -(-parameter.numel() // shards_of(parameter))


def _owners(
    groups: Groups, among: Callable[[Tensor], dist.ProcessGroup | None]
) -> dict[Tensor, int]:
    loads: dict[dist.ProcessGroup | None, list[int]] = {}
    owners: dict[Tensor, int] = {}
    for options in groups:
        alike: dict[dist.ProcessGroup | None, list[Tensor]] = defaultdict(list)
        for parameter in options["params"]:
            alike[among(parameter)].append(parameter)
        for group, parameters in alike.items():
            load = loads.setdefault(group, [0] * dist.get_world_size(group))
            owners.update(
                zip(parameters, deal([share_of(each) for each in parameters], load), strict=True)
            )
    return owners


def _in_turn(owned: dict[int, list[Tensor]], bucket_bytes: int) -> list[Bucket]:
    """Every owner's first bucket, then every owner's second: all links are busy."""
    by_owner = [
        [(owner, bucket) for bucket in _buckets(parameters, bucket_bytes)]
        for owner, parameters in owned.items()
    ]
    return [each for turn in zip_longest(*by_owner) for each in turn if each is not None]


def _buckets(parameters: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Parameters of one dtype, together at most `bucket_bytes`; larger ones alone."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_dtype[parameter.dtype].append(parameter)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        held = 0
        for parameter in alike:
            size = local_tensor(parameter).nbytes
            if bucket and held + size > bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append(parameter)
            held += size
        if bucket:
            yield bucket


def _send(buckets: list[Bucket], group: dist.ProcessGroup | None) -> None:
    me = dist.get_rank(group)
    flying: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def land() -> None:
        work, flat, tensors = flying.popleft()
        work.wait()
        if tensors:
            for tensor, part in zip(
                tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))

    for owner, parameters in buckets:
        tensors = [local_tensor(each) for each in parameters]
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat, tensors = tensors[0], []  # as it lies
        elif owner == me:
            flat, tensors = torch.cat([each.reshape(-1) for each in tensors]), []
        else:
            flat = tensors[0].new_empty(sum(each.numel() for each in tensors))
        flying.append(
            (dist.broadcast(flat, group_src=owner, group=group, async_op=True), flat, tensors)
        )
        if len(flying) == _IN_FLIGHT:
            land()
    while flying:
        land()
