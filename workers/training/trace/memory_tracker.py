"""torch's MemTracker, for steps of several micro-batches: it would refuse the second forward pass
of a module.

Loads torch.distributed; knows nothing of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker


class _NoModules:
    """In place of MemTracker's hooks on modules, which do not bear a backward pass in two halves."""

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


class Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """What it keeps of a module is that of its newest forward pass; nothing where it is not told
    `by_module`.
    """

    def __init__(self, *, by_module: bool) -> None:
        super().__init__()
        if not by_module:
            self._mod_tracker: Any = _NoModules()

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)  # type: ignore[no-untyped-call]
        super()._pre_fw_hook(module, inputs)

    def modules(self) -> list[dict[str, Any]]:
        """Bytes of each module in its newest passes: its own, in, out, and the most that anything
        held meanwhile.
        """
        return [
            {
                "name": found.mod_fqn,
                "params": found.parameter_mem,
                "buffers": found.buffer_mem,
                "input": found.input_mem,
                "output": found.output_mem,
                "peak": max(found.local_peak.values(), default=0),
            }
            for found in self.memory_tracking.values()  # type: ignore[no-untyped-call]
        ]
