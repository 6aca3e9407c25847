"""Dtypes of weights: stored ones, and bf16 and fp16 copies of fp32 ones that ZeRO 0 and 1 compute
with.

The same arithmetic as `fully_shard` with that param_dtype: weights are cast before use, gradients
return through the cast in fp32. Does not depend on sharding or loss scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workers.models.decoder import Decoder
from workers.models.wrapped import Inner, wrapped, wrapper_of
from workers.training.numerics.fp16_matmul import Fp16MatmulMode

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
        return Fp16MatmulMode()  # type: ignore[no-untyped-call]
    return nullcontext()


def store_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the parameters of a meta-built module in `dtype`; buffers keep theirs."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def cast_copies(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """Make each block, and the rest of the model, compute with copies (`CastCopies`).

    Returns the decoder's variant; blocks are replaced in place.
    """
    for name, block in decoder.blocks.items():
        names = [name for name, _ in block.named_parameters()]
        decoder.blocks[name] = wrapped(block, CastCopies(names, dtype))
    in_blocks = {id(parameter) for parameter in decoder.blocks.parameters()}
    rest = [name for name, each in decoder.named_parameters() if id(each) not in in_blocks]
    return wrapped(decoder, CastCopies(rest, dtype))


def casts_of(decoder: Decoder) -> list[CastCopies]:
    """The casts of a decoder's blocks, and of the rest of it."""
    units = (wrapper_of(each, CastCopies) for each in (*decoder.blocks.values(), decoder))
    return [unit for unit in units if unit is not None]


class CastCopies:
    """The wrapper of a module that computes with `dtype` copies of its fp32 parameters `names`.

    Copies live from the module's forward to its backward pass. While `watch` is set, `copies` lists
    their storages.
    """

    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        self.names, self.dtype, self.watch = tuple(names), dtype, False
        self.copies: list[Tensor] = []
        self._unit: _Unit | None = None

    def __call__(self, module: nn.Module, inner: Inner, /, *args: Any) -> Any:
        """The module's output."""
        if self._unit is None:
            self._unit = _Unit(module, self.names)
        return functional_call(self._unit, self._copied(self._unit.places), (inner, *args))

    def _copied(self, places: dict[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
        # looked up at each call: another version may have replaced the parameter
        copies = {
            f"module.{name}": getattr(owner, leaf).to(self.dtype)
            for name, (owner, leaf) in places.items()
        }
        if self.watch:
            self.copies.extend(copy.detach() for copy in copies.values())
        return copies


class _Unit(nn.Module):
    """A module as `module` for `functional_call`, which swaps the parameters at `places`."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.module = module
        self.places = {
            name: (module.get_submodule(path), leaf)
            for name in names
            for path, _, leaf in [name.rpartition(".")]
        }

    def forward(self, inner: Inner, *args: Any) -> Any:
        """The module's forward pass without its wrapper."""
        return inner(*args)
