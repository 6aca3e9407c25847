"""The host's side of parameters on a device: master weights, gradients on their way in, new weights
on their way out.

Where the parameters lie in host memory already, they are their own masters and nothing is copied.
Does not know rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor
from workers.training.optim.parameter_layout import lender, with_local


@dataclass(slots=True)
class _Copy:
    """`host` is what the update rule sees; `version` counts the writes to the weights that it has
    taken part in.
    """

    host: Tensor
    version: int = -1
    gradient: Tensor | None = None
    # where on the device the gradient lay that began to travel, and its version
    sent: tuple[int, int] | None = None


class HostCopies:
    """Copies of `parameters` in pinned host memory, filled and sent back over streams of their own.

    With `follow` a gradient begins to travel as soon as the backward pass has made it
    (ZeRO-Offload, arXiv 2101.06840,
    section 4.1); else, and where it was changed after that, with its part of the update. Followed
    ones lie in host
    memory together, others part by part, so that states on a disk, whose point is little memory, do
    without.

    `keep`: masters stay in host memory from step to step and are read again only where someone else
    wrote the weights
    (a checkpoint); else they exist while their part of the update does.
    """

    def __init__(self, parameters: list[Tensor], *, keep: bool) -> None:
        self.keep = keep
        self._copies: dict[Tensor, _Copy] = {}
        on_device = [each for each in parameters if _on_device(each)]
        for parameter in on_device:
            empty = torch.empty(0, dtype=parameter.dtype)
            self._copies[parameter] = _Copy(with_local(parameter, empty))
        self._in = self._out = None
        self.follows = False
        if on_device:
            device = local_tensor(on_device[0]).device
            self._in, self._out = torch.Stream(device), torch.Stream(device)
            watched: Any
            for watched in on_device if keep else ():
                watched.register_post_accumulate_grad_hook(self._made)

    @property
    def apart(self) -> bool:
        """Whether anything is copied at all."""
        return bool(self._copies)

    def _made(self, parameter: Tensor) -> None:
        """A gradient is whole on whatever stream the backward pass has there; it is on its way from
        here on.
        """
        if not self.follows or self._in is None:
            return
        copy = self._copies[parameter]
        self._in.wait_stream(torch.accelerator.current_stream())
        with self._in:
            self._send_gradient(parameter, copy)

    def _send_gradient(self, parameter: Tensor, copy: _Copy) -> None:
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad)
        copy.gradient = with_local(parameter, _to_host(gradient))
        copy.sent = gradient.data_ptr(), gradient._version

    def forget(self) -> None:
        """Gradients are gone: of an update that was not made, copies may be on their way or there."""
        for copy in self._copies.values():
            copy.gradient = copy.sent = None

    def host(self, parameter: Tensor) -> Tensor:
        """The tensor that stands for `parameter` on the host, always the same one."""
        copy = self._copies.get(parameter)
        return parameter if copy is None else copy.host

    @property
    def held(self) -> list[Tensor]:
        """Masters in host memory."""
        return [copy.host for copy in self._copies.values()]

    def fetch(self, parameters: list[Tensor]) -> torch.Event | None:
        """Start copying gradients, and weights that are not there; None where nothing is to be
        waited for.
        """
        if self._in is None:
            return None
        self._in.wait_stream(torch.accelerator.current_stream())
        with self._in:
            for parameter in parameters:
                copy = self._copies[parameter]
                weights, master = local_tensor(parameter), lender(copy.host)
                if parameter.grad is not None:
                    gradient = local_tensor(parameter.grad)
                    if copy.sent != (gradient.data_ptr(), gradient._version):
                        self._send_gradient(parameter, copy)
                if copy.version != weights._version:
                    master.data = _to_host(weights)
            return self._in.record_event()

    def arrive(
        self, parameters: list[Tensor], copied: torch.Event | None, *, factor: float = 1.0
    ) -> None:
        """Wait for `fetch`; gradients, times `factor`, then stand where the rule looks for them."""
        if copied is None:
            return
        copied.synchronize()
        for parameter in parameters:
            copy = self._copies[parameter]
            copy.host.grad, copy.gradient, copy.sent = copy.gradient, None, None
        if factor != 1.0:
            hosts = [self._copies[parameter].host.grad for parameter in parameters]
            torch._foreach_mul_([local_tensor(each) for each in hosts if each is not None], factor)

    @torch.no_grad()
    def give_back(self, parameters: list[Tensor]) -> None:
        """Start copying new weights to the device."""
        if self._out is None:
            return
        with self._out:
            for parameter in parameters:
                copy = self._copies[parameter]
                weights, master = local_tensor(parameter), lender(copy.host)
                if copy.host.grad is not None:
                    weights.copy_(master, non_blocking=True)
                    copy.host.grad = None
                copy.version = weights._version if self.keep else -1
                if not self.keep:
                    # pinned memory is not used again before the copy out of it is done: torch's
                    # allocator sees to it
                    master.data = torch.empty(0, dtype=master.dtype)

    def settle(self) -> None:
        """What the device does next sees the new weights."""
        if self._out is not None:
            torch.accelerator.current_stream().wait_stream(self._out)


def _on_device(tensor: Tensor) -> bool:
    return local_tensor(tensor).device.type != "cpu"


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
