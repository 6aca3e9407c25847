"""Keys and values of all layers in blocks, and the attention that reads and writes them in place of
a model's own.

A model file knows nothing of this: its `attend` is settable. Knows no requests. Shapes: T query
tokens of all
sequences, H heads, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import paged_attention, write_kv
from kernels.decode import Plan
from kernels.decode.paged import QUANTISED
from workers.contracts.specs.model import ModelSpec
from workers.models.layers.documents import Documents


@dataclass(frozen=True, slots=True)
class Step:
    """Where the query tokens of a step go and what they see; `cu` is None where each sequence has
    one token.
    """

    slots_T: Tensor
    table: Tensor
    lens: Tensor
    cu: Tensor | None
    plan: Plan


class PagedCache:
    """`keys` and `values`: a tensor `[blocks, block_size, key-value heads, D]` a layer that is held
    here; of latent
    attention `keys` are the latents and rotary keys, and there are no values. Of int8 ones `scales`
    are `[blocks,
    block_size, key-value heads]` fp32, one a token and head. `step` is the present one. In CPU
    memory are places for
    `swap` blocks more.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        swap: int = 0,
        shares: int = 1,
        layers: int | None = None,
    ) -> None:
        heads, key_width, value_width = entry_shape(spec, shares)
        self.blocks, self.block_size = blocks, block_size
        held = spec.layers if layers is None else layers

        def made(width: int) -> list[Tensor]:
            shape = (blocks, block_size, heads, width)
            return [
                torch.empty(shape, dtype=dtype, device=device) for _ in range(held if width else 0)
            ]

        def scales() -> list[Tensor]:
            quantised = dtype in QUANTISED
            return [torch.empty(each.shape[:3], device=device) for each in self.keys if quantised]

        self.keys, self.values = made(key_width), made(value_width)
        self.scales = list(zip(scales(), scales(), strict=True))
        self.swap = swap
        self._host = [
            torch.empty(swap, *each.shape[1:], dtype=each.dtype, pin_memory=device.type == "cuda")
            for each in self.tensors()
        ]
        self.step: Step | None = None

    def tensors(self) -> list[Tensor]:
        """All of the device's."""
        return [*self.keys, *self.values, *(each for pair in self.scales for each in pair)]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks' contents, from and to: what copy on write left to be done, before the step
        writes.
        """
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
        for each in self.tensors():
            each.index_copy_(0, target, each.index_select(0, source))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks' contents to places in CPU memory."""
        _moved(self.tensors(), self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Back from places in CPU memory to blocks."""
        _moved(self._host, self.tensors(), pairs)

    def block_swap_s(self) -> float:
        """Seconds of a block to CPU memory and back, measured on up to 8 of them; 0 without places.

        Overwrites them.
        """
        count = min(8, self.swap, self.blocks)
        if not count:
            return 0.0
        pairs = [(each, each) for each in range(count)]
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self.swap_out(pairs)
            self.swap_in(pairs)
            if self.keys[0].is_cuda:
                torch.cuda.synchronize(self.keys[0].device)
            seconds.append(time.perf_counter() - began)
        return min(seconds) / count


def _moved(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    if not pairs:
        return
    source, target = torch.tensor(pairs).unbind(1)
    for a, b in zip(sources, targets, strict=True):
        b.index_copy_(0, target.to(b.device), a.index_select(0, source.to(a.device)).to(b.device))


class PagedAttend:
    """In place of `workers.models.layers.attention_math`, for one layer: this step's keys and values to the cache,
    attention from it.

    Queries, keys and values are `[1, T, H, D]`, the tokens of all sequences in a line.
    """

    def __init__(self, cache: PagedCache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BSHD: Tensor,
        v_BSHD: Tensor,
        *,
        window: int | None,
        dropout: float = 0.0,
        scale: float | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        step, keys, values = (
            self.cache.step,
            self.cache.keys[self.layer],
            self.cache.values[self.layer],
        )
        assert step is not None and documents is None and not dropout
        scales = self.cache.scales[self.layer] if self.cache.scales else None
        write_kv(k_BSHD[0], v_BSHD[0], keys, values, step.slots_T, scales=scales, check=False)
        out = paged_attention(
            q_BSHD[0],
            keys,
            values,
            step.table,
            step.lens,
            cu_q=step.cu,
            plan=step.plan,
            scale=scale,
            window=window,
            scales=scales,
        )
        assert isinstance(out, Tensor)
        return out.flatten(-2).unsqueeze(0)


def entry_shape(spec: ModelSpec, shares: int = 1) -> tuple[int, int, int]:
    """Heads, width of a key and width of a value that a token has in the cache of one layer, on
    each of so many ranks.

    Of latent attention the latent and the rotary key, one for all heads, are kept as a key, and no
    value.
    """
    if spec.mla is not None:
        return 1, spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim, 0
    if spec.mfa is not None:
        return 1, spec.mfa.head_dim, spec.mfa.head_dim
    return max(1, spec.kv_heads // shares), spec.head_dim, spec.head_dim


def block_bytes(
    spec: ModelSpec,
    *,
    block_size: int,
    dtype: torch.dtype,
    shares: int = 1,
    layers: int | None = None,
) -> int:
    """Bytes of one block in all layers, or in those that one of so many ranks holds; scales of int8
    ones included.
    """
    heads, key_width, value_width = entry_shape(spec, shares)
    head_bytes = (key_width + value_width) * dtype.itemsize + (
        2 * torch.float32.itemsize if dtype in QUANTISED else 0
    )
    return (spec.layers if layers is None else layers) * block_size * heads * head_bytes
