"""The paged KV cache of all layers, and the attention that reads and writes it.

Replaces the `attend` of a model's attention layers; does not depend on requests. Shapes: T query
tokens of all sequences, H heads, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import apply_rope, paged_attention, write_kv
from kernels.paged_kv import PagePlan
from kernels.paged_kv.api import QUANTIZED_DTYPES
from workers.contracts.specs.model import ModelSpec
from workers.models.layers.documents import Documents


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where a step's query tokens are written and what they attend to.

    `cu` is None if each sequence has one query token.
    """

    slots_T: Tensor
    table: Tensor
    lens: Tensor
    cu: Tensor | None
    plan: PagePlan


class PagedCache:
    """The cache tensors of the layers on this rank.

    Per layer, `keys` and `values` are `[blocks, block_size, key-value heads, D]`. For latent
    attention `keys` hold latents and rotary keys, and there are no values. For int8, `scales` are
    fp32 `[blocks, block_size, key-value heads]`. `swap` more blocks fit into CPU memory.
    `metadata` is that of the current metadata. `generation` counts allocations.
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
        local_layers = spec.layers if layers is None else layers

        def create(width: int) -> list[Tensor]:
            shape = (blocks, block_size, heads, width)
            return [
                torch.empty(shape, dtype=dtype, device=device)
                for _ in range(local_layers if width else 0)
            ]

        def create_scales() -> list[Tensor]:
            quantized = dtype in QUANTIZED_DTYPES
            return [torch.empty(keys.shape[:3], device=device) for keys in self.keys if quantized]

        self.keys, self.values = create(key_width), create(value_width)
        self.scales = list(zip(create_scales(), create_scales(), strict=True))
        self.swap, is_cuda = swap, device.type == "cuda"
        self._cpu = [
            torch.empty(swap, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=is_cuda)
            for tensor in self.tensors()
        ]
        self.metadata: AttentionMetadata | None = None
        self.generation = 0

    def tensors(self) -> list[Tensor]:
        """All cache tensors on the device."""
        return [*self.keys, *self.values, *(scale for pair in self.scales for scale in pair)]

    def release(self) -> None:
        """Free the memory of the device's tensors until `acquire`; their contents are lost."""
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(0)

    def acquire(self) -> None:
        """Allocate the memory again after `release`."""
        self.generation += 1
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), before the step writes: the copies of copy on write."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
        for tensor in self.tensors():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (block, slot) to CPU memory."""
        _copy_between(self.tensors(), self._cpu, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (slot, block) back from CPU memory."""
        _copy_between(self._cpu, self.tensors(), pairs)

    def block_swap_s(self) -> float:
        """Measured seconds per block to CPU memory and back; 0 without swap space.

        Overwrites up to 8 blocks.
        """
        count = min(8, self.swap, self.blocks)
        if not count:
            return 0.0
        pairs = [(block, block) for block in range(count)]
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self.swap_out(pairs)
            self.swap_in(pairs)
            if self.keys[0].is_cuda:
                torch.cuda.synchronize(self.keys[0].device)
            seconds.append(time.perf_counter() - began)
        return min(seconds) / count


def _copy_between(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    if not pairs:
        return
    source, target = torch.tensor(pairs).unbind(1)
    for a, b in zip(sources, targets, strict=True):
        b.index_copy_(0, target.to(b.device), a.index_select(0, source.to(a.device)).to(b.device))


class PagedAttention:
    """Attention of one layer: writes the step's keys and values to the cache, then reads from it.

    Queries, keys and values are `[1, T, H, D]`, the tokens of all sequences concatenated. With
    `rotates` it takes them before their rotation: one launch rotates queries and keys and writes
    the cache, on a GPU whose cache is not quantized.
    """

    def __init__(self, cache: PagedCache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        self.rotates = cache.keys[layer].is_cuda and not cache.scales

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
        rope: tuple[Tensor, Tensor] | None = None,
        interleaved: bool = False,
    ) -> Tensor:
        """The attention output `[1, T, H * D]`; `rope`, if it rotates: cosines, sines `[T, R]`."""
        metadata, keys, values = (
            self.cache.metadata,
            self.cache.keys[self.layer],
            self.cache.values[self.layer],
        )
        assert metadata is not None and documents is None and not dropout
        scales = self.cache.scales[self.layer] if self.cache.scales else None
        slots_T = metadata.slots_T
        if rope is not None:
            written = (v_BSHD, keys, values, slots_T.unsqueeze(0))
            rotated = apply_rope(
                q_BSHD, k_BSHD, *rope, cache=written, interleaved=interleaved, check=False
            )
            assert isinstance(rotated, Tensor)
            q_BSHD = rotated
        else:
            write_kv(k_BSHD[0], v_BSHD[0], keys, values, slots_T, scales=scales, check=False)
        out = paged_attention(
            q_BSHD[0],
            keys,
            values,
            metadata.table,
            metadata.lens,
            cu_q=metadata.cu,
            plan=metadata.plan,
            scale=scale,
            window=window,
            scales=scales,
        )
        assert isinstance(out, Tensor)
        return out.flatten(-2).unsqueeze(0)


def entry_shape(spec: ModelSpec, shares: int = 1) -> tuple[int, int, int]:
    """Heads, key width and value width per token and layer, on each of `shares` ranks.

    Latent attention stores the latent and the rotary key as one key for all heads, and no value.
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
    """Bytes of one block in `layers` layers (default all), with int8 scales, on one rank."""
    heads, key_width, value_width = entry_shape(spec, shares)
    head_bytes = (key_width + value_width) * dtype.itemsize + (
        2 * torch.float32.itemsize if dtype in QUANTIZED_DTYPES else 0
    )
    return (spec.layers if layers is None else layers) * block_size * heads * head_bytes
