"""Bytes that one step passes to torch.distributed, by collective. Slows that step down.

Counted as the planner does: an all-reduce by its buffer, an all-gather by its output, a
reduce-scatter and an all-to-all by their input, a broadcast by its tensor, a send by its message;
not the ring's bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operators of torch.ops.c10d: kind, and the index of the counted argument
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
# operators of torch.ops._c10d_functional, counted by input; an all-gather's is one rank's share
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts `bytes` by kind in the thread that enters it, backward passes included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = dict.fromkeys(KINDS, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor issues its collectives separately
        if func.namespace == "c10d":
            self._c10d(func._opname, args)
        elif func.namespace == "_c10d_functional" and func._opname in _FUNCTIONAL:
            self._functional(func._opname, args)
        return func(*args, **(kwargs or {}))

    def values(self) -> dict[str, float]:
        """Bytes of the called kinds, and their sum."""
        counts = {f"comm/{kind}_bytes": float(size) for kind, size in self.bytes.items() if size}
        return {"comm/bytes": float(sum(self.bytes.values())), **counts}

    def _c10d(self, name: str, args: Any) -> None:
        if name in _C10D:
            kind, place = _C10D[name]
            self.bytes[kind] += _bytes(tree_leaves(args[place]))

    def _functional(self, name: str, args: Any) -> None:
        times = args[1] if name.startswith("all_gather") else 1  # the size of the group
        self.bytes[_FUNCTIONAL[name]] += times * _bytes(tree_leaves(args[0]))


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))
