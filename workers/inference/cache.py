"""Keys and values of all layers in blocks, and the attention that reads and writes them in place of a model's own.

A model file knows nothing of this: its `attend` is settable. Knows no requests. Shapes: T query tokens of all
sequences, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import paged_attention, write_kv
from kernels.decode import Plan
from workers.contracts.model import ModelSpec
from workers.models.documents import Documents


@dataclass(frozen=True, slots=True)
class Step:
    """Where the query tokens of a step go and what they see; `cu` is None where each sequence has one token."""

    slots_T: Tensor
    table: Tensor
    lens: Tensor
    cu: Tensor | None
    plan: Plan


class PagedCache:
    """`keys` and `values`: a tensor `[blocks, block_size, key-value heads, D]` a layer. `step` is the present one."""

    def __init__(
        self, spec: ModelSpec, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, key_width, value_width = entry_shape(spec)
        self.blocks, self.block_size = blocks, block_size

        def made(width: int) -> list[Tensor]:
            shape = (blocks, block_size, heads, width)
            return [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.layers)]

        self.keys, self.values = made(key_width), made(value_width)
        self.step: Step | None = None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks' contents, from and to: what copy on write left to be done, before the step writes."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
        for each in (*self.keys, *self.values):
            each.index_copy_(0, target, each.index_select(0, source))


class PagedAttend:
    """In place of `workers.models.attend`, for one layer: this step's keys and values to the cache, attention from it.

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
        step, keys, values = self.cache.step, self.cache.keys[self.layer], self.cache.values[self.layer]
        assert step is not None and documents is None and not dropout
        write_kv(k_BSHD[0], v_BSHD[0], keys, values, step.slots_T, check=False)
        out = paged_attention(
            q_BSHD[0], keys, values, step.table, step.lens, cu_q=step.cu, plan=step.plan, scale=scale, window=window
        )
        assert isinstance(out, Tensor)
        return out.flatten(-2).unsqueeze(0)


def entry_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """Heads, width of a key and width of a value that a token has in the cache of one layer.

    Latent attention is kept as the keys and values that rise from its latents, not as the latents.
    """
    if spec.mla is not None:
        return spec.heads, spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim, spec.mla.v_head_dim
    if spec.mfa is not None:
        return 1, spec.mfa.head_dim, spec.mfa.head_dim
    return spec.kv_heads, spec.head_dim, spec.head_dim


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    heads, key_width, value_width = entry_shape(spec)
    return spec.layers * block_size * heads * (key_width + value_width) * dtype.itemsize
