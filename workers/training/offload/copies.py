"""Host copies of device parameters: master weights, incoming gradients and outgoing new weights.

Parameters in host memory are their own masters and are not copied. Does not depend on rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor
from workers.training.optim.parameter_layout import data_owner, wrap_local


@dataclass(slots=True)
class _Copy:
    """`host` is the tensor that the rule updates; `version` is the weights' version at the last
    copy.
    """

    host: Tensor
    version: int = -1
    gradient: Tensor | None = None
    # data pointer and version of the device gradient whose copy has started
    sent: tuple[int, int] | None = None


class HostCopies:
    """Copies of `parameters` in pinned host memory, filled and sent back on separate streams.

    With `set_gradients_final` the copy of a gradient starts as soon as the backward pass has made
    it (ZeRO-Offload, arXiv 2101.06840, section 4.1); otherwise, and if it changed since, with its
    part of the update. Early copies are all in host memory at once, others part by part: states on
    a disk, which are for small memory, use the latter.

    `keep_masters`: masters stay in host memory between steps and are read again only if the weights
    were written elsewhere (a checkpoint); otherwise they exist during their part of the update.
    """

    def __init__(self, parameters: list[Tensor], *, keep_masters: bool) -> None:
        self.keep_masters = keep_masters
        self._copies: dict[Tensor, _Copy] = {}
        on_device = [each for each in parameters if _on_device(each)]
        for parameter in on_device:
            empty = torch.empty(0, dtype=parameter.dtype)
            self._copies[parameter] = _Copy(wrap_local(parameter, empty))
        self._in = self._out = None
        self.copies_early = False
        if on_device:
            device = local_tensor(on_device[0]).device
            self._in, self._out = torch.Stream(device), torch.Stream(device)
            hooked: Any
            for hooked in on_device if keep_masters else ():
                hooked.register_post_accumulate_grad_hook(self._gradient_ready)

    @property
    def has_copies(self) -> bool:
        """Whether any parameter is on a device."""
        return bool(self._copies)

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Start copying a gradient that the backward pass has completed on the current stream."""
        if not self.copies_early or self._in is None:
            return
        copy = self._copies[parameter]
        self._in.wait_stream(torch.accelerator.current_stream())
        with self._in:
            self._send_gradient(parameter, copy)

    def _send_gradient(self, parameter: Tensor, copy: _Copy) -> None:
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad)
        copy.gradient = wrap_local(parameter, _to_host(gradient))
        copy.sent = gradient.data_ptr(), gradient._version

    def drop_gradients(self) -> None:
        """Drop copied gradients, finished or not, of a step without update."""
        for copy in self._copies.values():
            copy.gradient = copy.sent = None

    def host_tensor(self, parameter: Tensor) -> Tensor:
        """The tensor that represents `parameter` on the host, always the same one."""
        copy = self._copies.get(parameter)
        return parameter if copy is None else copy.host

    @property
    def masters(self) -> list[Tensor]:
        """Master weights in host memory."""
        return [copy.host for copy in self._copies.values()]

    def start_fetch(self, parameters: list[Tensor]) -> torch.Event | None:
        """Start copying gradients and missing weights; None if there is nothing to wait for."""
        if self._in is None:
            return None
        self._in.wait_stream(torch.accelerator.current_stream())
        with self._in:
            for parameter in parameters:
                copy = self._copies[parameter]
                weights, master = local_tensor(parameter), data_owner(copy.host)
                if parameter.grad is not None:
                    gradient = local_tensor(parameter.grad)
                    if copy.sent != (gradient.data_ptr(), gradient._version):
                        self._send_gradient(parameter, copy)
                if copy.version != weights._version:
                    master.data = _to_host(weights)
            return self._in.record_event()

    def finish_fetch(
        self, parameters: list[Tensor], copied: torch.Event | None, *, factor: float = 1.0
    ) -> None:
        """Wait for `start_fetch`; gradients, times `factor`, become the host tensors' `grad`."""
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
    def start_return(self, parameters: list[Tensor]) -> None:
        """Start copying new weights to the device."""
        if self._out is None:
            return
        with self._out:
            for parameter in parameters:
                copy = self._copies[parameter]
                weights, master = local_tensor(parameter), data_owner(copy.host)
                if copy.host.grad is not None:
                    weights.copy_(master, non_blocking=True)
                    copy.host.grad = None
                copy.version = weights._version if self.keep_masters else -1
                if not self.keep_masters:
                    # torch's allocator reuses pinned memory only after the copy out of it is done
                    master.data = torch.empty(0, dtype=master.dtype)

    def wait_for_return(self) -> None:
        """Make the current device stream wait for the new weights."""
        if self._out is not None:
            torch.accelerator.current_stream().wait_stream(self._out)


def _on_device(tensor: Tensor) -> bool:
    return local_tensor(tensor).device.type != "cpu"


def _to_host(tensor: Tensor) -> Tensor:
    host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host_tensor.copy_(tensor, non_blocking=True)
