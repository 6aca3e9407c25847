"""bf16 and fp16 computation over fp32 weights, for ZeRO stages with unsharded parameters.

The same arithmetic as `fully_shard` with that param_dtype: weights are cast before use, gradients
return through the cast in fp32. Does not depend on sharding or loss scales.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workers.training.numerics.fp16_products import HalfProducts

# the compute dtype; for fp8, of everything but the linear layers inside blocks
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def matmul_context(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Around forward and backward passes: fp16 matrix products on a CPU run in fp32."""
    if precision == "fp16" and device.type == "cpu":
        return HalfProducts()  # type: ignore[no-untyped-call]
    return nullcontext()


class CastCopies:
    """Makes each block, and the rest of the model, compute with `dtype` copies of its fp32
    parameters.

    Copies live from a unit's forward to its backward pass. While `watch` is set, `copies` lists
    their storages.
    """

    def __init__(self, decoder: nn.Module, blocks: nn.ModuleDict, dtype: torch.dtype) -> None:
        self.dtype, self.watch = dtype, False
        self.copies: list[Tensor] = []
        in_blocks = {id(parameter) for parameter in blocks.parameters()}
        for block in blocks.values():
            self._cast(block, [name for name, _ in block.named_parameters()])
        rest = [
            name for name, parameter in decoder.named_parameters() if id(parameter) not in in_blocks
        ]
        self._cast(decoder, rest)

    def _cast(self, module: nn.Module, names: list[str]) -> None:
        unit = _Unit(module)
        # looked up at each call: another version may have replaced the parameter
        places = {
            name: (module.get_submodule(path), leaf)
            for name in names
            for path, _, leaf in [name.rpartition(".")]
        }

        def forward(*args: Any) -> Any:
            return functional_call(unit, self._copied(places), args)

        module.forward = forward

    def _copied(self, places: dict[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
        copies = {
            f"module.{name}": getattr(owner, leaf).to(self.dtype)
            for name, (owner, leaf) in places.items()
        }
        if self.watch:
            self.copies.extend(copy.detach() for copy in copies.values())
        return copies


class _Unit(nn.Module):
    """A module as `module`, with its previous forward, for `functional_call` to swap parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.plain = module.forward

    def forward(self, *args: Any) -> Any:
        return self.plain(*args)
