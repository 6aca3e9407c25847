"""torch's MemTracker for steps of several micro-batches and frozen parameters, which it rejects.

Imports torch.distributed; does not depend on steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker


class _NoModuleTracking:
    """Replaces MemTracker's module hooks, which do not support a backward pass in two halves."""

    parents: tuple[str, ...] = ()

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: Any) -> None:
        return

    def register_user_hooks(self, *_: Any) -> None:
        return

    def clear_user_hooks(self) -> None:
        return


class _NoHandle:
    """Takes the place of a gradient hook's handle."""

    def remove(self) -> None:
        return


class MemoryTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Keeps the data of each module's last forward pass; none unless `by_module`.

    MemTracker of torch 2.13 registers gradient hooks on all parameters, which raises RuntimeError
    for those that require none.
    """

    def __init__(self, *, by_module: bool) -> None:
        super().__init__()
        if not by_module:
            self._mod_tracker: Any = _NoModuleTracking()

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles[parameter] = (_NoHandle(), _NoHandle())
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)  # type: ignore[no-untyped-call]
        super()._pre_fw_hook(module, inputs)

    def modules(self) -> list[dict[str, Any]]:
        """Bytes of each module in its last passes: parameters, buffers, input, output and peak of
        all.
        """
        return [
            {
                "name": record.mod_fqn,
                "params": record.parameter_mem,
                "buffers": record.buffer_mem,
                "input": record.input_mem,
                "output": record.output_mem,
                "peak": max(record.local_peak.values(), default=0),
            }
            for record in self.memory_tracking.values()  # type: ignore[no-untyped-call]
        ]
