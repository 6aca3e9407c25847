"""Gradients averaged over a group of ranks, in buckets, while the backward pass goes on: where DDP
cannot go.

For models cut into stages, split over a tensor-parallel mesh or holding experts. Knows parameters;
does not know plans.
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
from workers.training.optim.parameter_layout import with_local

BUCKET_BYTES = 25 << 20  # DDP's


@dataclass(slots=True, eq=False)
class _Bucket:
    names: list[str]
    waits_for: set[str]
    work: Any = None


class GradientReducer:
    """Means over `group` (None: all ranks) of the gradients of `parameters`, by name; a DTensor's
    by its local part.

    While `syncing` is set, a bucket is sent as soon as the backward pass has made its last
    gradient; set it for the
    last micro-batch alone. `finish` sends what is left and waits. Sums are divided by
    `average_over`, which for experts
    is more than the ranks of their group. Buckets go in reverse order of parameters, roughly that
    of the backward pass,
    and in the same order on every rank. Gradients are reduced in their own dtype, and become views
    of their bucket.
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
            _Bucket(names, set(names)) for names in _cut(self.parameters, bucket_bytes)
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._sent = 0
        for name, parameter in self.parameters.items():
            watched: Any = parameter
            watched.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not been sent, wait for all; gradients are then the same on every rank of
        the group.

        Raises RuntimeError naming parameters without gradient, before anything more is sent: the
        other ranks would
        take what this one sends next for what is missing.
        """
        missing = [name for name, parameter in self.parameters.items() if parameter.grad is None]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise RuntimeError(
                f"no gradient for {', '.join(missing[:4])}{more}, of {len(self.parameters)} "
                "parameters whose gradients "
                "are averaged over ranks; the loss must depend on every parameter, on every rank"
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
                f"the gradient of {name} changed after it was ready to be averaged over ranks; "
                "set syncing for the backward pass of the last micro-batch only"
            )
        bucket.waits_for.remove(name)
        self._send(all_=False)

    def _send(self, *, all_: bool) -> None:
        """In order, as DDP does: a full bucket waits for those before it."""
        while self._sent < len(self._buckets) and (all_ or not self._buckets[self._sent].waits_for):
            bucket = self._buckets[self._sent]
            self._sent += 1
            parameters = [self.parameters[name] for name in bucket.names]
            gradients = [_laid_out(each) for each in parameters]
            flat = torch.cat([local_tensor(each).reshape(-1) for each in gradients]).div_(
                self.average_over
            )
            sizes = [local_tensor(each).numel() for each in gradients]
            for parameter, gradient, part in zip(
                parameters, gradients, torch.split(flat, sizes), strict=True
            ):
                # the gradients' own memory is free from here on
                parameter.grad = with_local(gradient, part.view(local_tensor(gradient).shape))
            bucket.work = dist.all_reduce(flat, group=self.group, async_op=True)


def _cut(parameters: dict[str, Tensor], bucket_bytes: int) -> Iterator[list[str]]:
    """Names from last to first, in buckets of one dtype; a larger parameter makes a bucket of its
    own.
    """
    open_: dict[torch.dtype, tuple[list[str], int]] = defaultdict(lambda: ([], 0))
    for name in reversed(parameters):
        dtype, size = parameters[name].dtype, local_tensor(parameters[name]).nbytes
        names, held = open_[dtype]
        if names and held + size > bucket_bytes:
            yield names
            names, held = [], 0
        open_[dtype] = ([*names, name], held + size)
    for names, _ in open_.values():
        yield names


def _laid_out(parameter: Tensor) -> Tensor:
    """The gradient, laid over its mesh as the parameter is: sums still to be made along a
    tensor-parallel axis are.
    """
    gradient: Any = parameter.grad
    wanted = getattr(parameter, "placements", None)
    if wanted is None or gradient.placements == wanted:
        return gradient  # type: ignore[no-any-return]
    return gradient.redistribute(placements=wanted)  # type: ignore[no-any-return]
