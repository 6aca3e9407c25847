"""Averages gradients over a group of ranks, in buckets, during the backward pass.

For models that DDP does not support: pipeline stages, tensor-parallel shards, experts. Does not
depend on plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.metrics.memory import local_tensor
from workers.training.optim.parameter_layout import wrap_local

BUCKET_BYTES = 25 << 20  # DDP's


@dataclass(slots=True, eq=False)
class _Bucket:
    names: list[str]
    waits_for: set[str]
    work: Any = None


class GradientReducer:
    """Averages the gradients of `parameters` over `group` (None: all ranks); of DTensors, the local
    shards.

    While `syncing` is set, a bucket is sent as soon as the backward pass has produced its last
    gradient; set it for the last micro-batch only. `finish` sends the rest and waits. Sums are
    divided by `average_over`, which for experts exceeds the size of their group. Buckets are sent
    in reverse order of parameters, roughly that of the backward pass, the same on every rank.
    Gradients are reduced in their own dtype and become views of their bucket.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        *,
        average_over: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.group, self.average_over = dict(parameters), group, average_over
        self.syncing = False
        self._buckets = [
            _Bucket(names, set(names)) for names in _bucket_names(self.parameters, bucket_bytes)
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._sent = 0
        for name, parameter in self.parameters.items():
            watched: Any = parameter
            watched.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name))

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets and wait; gradients are then equal on all ranks of the group.

        Raises RuntimeError with the names of parameters without gradient before it sends anything:
        other ranks would match the next message to the missing one.
        """
        missing = [name for name, parameter in self.parameters.items() if parameter.grad is None]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise RuntimeError(
                f"no gradient for {', '.join(missing[:4])}{more} of {len(self.parameters)} "
                "parameters; the loss must depend on every parameter, on every rank"
            )
        self.syncing = False
        self._send(all_=True)
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work, bucket.waits_for = None, set(bucket.names)
        self._sent = 0

    @torch.no_grad()
    def _ready(self, name: str) -> None:
        if not self.syncing:
            return
        bucket = self._bucket_of[name]
        if name not in bucket.waits_for:
            raise RuntimeError(
                f"the gradient of {name} changed after it was ready to be reduced; "
                "set syncing for the backward pass of the last micro-batch only"
            )
        bucket.waits_for.remove(name)
        self._send(all_=False)

    def _send(self, *, all_: bool) -> None:
        """Send in order, as DDP does: a full bucket waits for those before it."""
        while self._sent < len(self._buckets) and (all_ or not self._buckets[self._sent].waits_for):
            bucket = self._buckets[self._sent]
            self._sent += 1
            parameters = [self.parameters[name] for name in bucket.names]
            gradients = [_placed_like_parameter(each) for each in parameters]
            flat = torch.cat([local_tensor(each).reshape(-1) for each in gradients]).div_(
                self.average_over
            )
            sizes = [local_tensor(each).numel() for each in gradients]
            for parameter, gradient, part in zip(
                parameters, gradients, torch.split(flat, sizes), strict=True
            ):
                # frees the gradient's own memory
                parameter.grad = wrap_local(gradient, part.view(local_tensor(gradient).shape))
            bucket.work = dist.all_reduce(flat, group=self.group, async_op=True)


def _bucket_names(parameters: dict[str, Tensor], bucket_bytes: int) -> Iterator[list[str]]:
    """Names from last to first, in buckets of one dtype; a larger parameter is its own bucket."""
    open_: dict[torch.dtype, tuple[list[str], int]] = defaultdict(lambda: ([], 0))
    for name in reversed(parameters):
        dtype, size = parameters[name].dtype, local_tensor(parameters[name]).nbytes
        names, size_so_far = open_[dtype]
        if names and size_so_far + size > bucket_bytes:
            yield names
            names, size_so_far = [], 0
        open_[dtype] = ([*names, name], size_so_far + size)
    for names, _ in open_.values():
        yield names


def _placed_like_parameter(parameter: Tensor) -> Tensor:
    """The gradient with the parameter's placements: partial sums over a tensor-parallel axis are
    reduced.
    """
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is None or gradient.placements == placements:
        return gradient  # type: ignore[no-any-return]
    return gradient.redistribute(placements=placements)  # type: ignore[no-any-return]
