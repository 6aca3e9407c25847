"""Weights from the first training rank to the rollout ranks, in place and without files.

A process group of its own: training ranks never wait for a rollout rank otherwise. Does not depend
on versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

_BUCKET_BYTES = 32 << 20


class WeightLink:
    """Rank 0 of the link is the first training rank, the others are the rollout ranks."""

    def __init__(
        self, store: Store, *, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Connects all ranks of the link. Collective."""
        prefixed, limit = PrefixStore("weights", store), timedelta(seconds=timeout_s)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, limit)

    def send(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Send weights in `dtype`, in the order that all receivers expect. Collective."""
        for bucket in _buckets((full.to(dtype) for _, full in weights), dtype):
            self._broadcast(torch.cat([each.reshape(-1) for each in bucket]))

    @torch.no_grad()
    def receive(self, targets: Mapping[str, Tensor]) -> None:
        """Replace the values of `targets`, in order of their names. Collective."""
        ordered = [targets[name] for name in sorted(targets)]
        for bucket in _buckets(ordered, ordered[0].dtype):
            flat = torch.empty(
                sum(each.numel() for each in bucket), dtype=bucket[0].dtype, device=bucket[0].device
            )
            self._broadcast(flat)
            for target, values in zip(
                bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True
            ):
                target.copy_(values.view_as(target))

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([flat], options).wait()


def _buckets(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Groups of consecutive tensors of about `_BUCKET_BYTES`: fewer, larger messages."""
    bucket: list[Tensor] = []
    numbers = 0
    for each in tensors:
        bucket.append(each)
        numbers += each.numel()
        if numbers * dtype.itemsize >= _BUCKET_BYTES:
            yield bucket
            bucket, numbers = [], 0
    if bucket:
        yield bucket
