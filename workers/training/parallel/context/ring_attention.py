"""Ring attention (arXiv 2310.01889): keys and values are passed around the ranks of a sequence.

A torch operator, so that recomputation can save its result and the ring runs once. Torch 2.13's
context_parallel has rings for CUDA's flash, efficient and cuDNN attention only, refuses attention
biases there, and on a CPU raises NotImplementedError. Its flex attention, for windows and
documents, gathers all keys and values on every rank and needs a multiple of 128 tokens per rank.
Does not depend on models. Shapes: B batch, S positions of this rank, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from workers.models.layers.block_attention import block_backward, block_forward
from workers.models.layers.documents import AttentionChunk, Documents
from workers.training.parallel.context.ring_chunks import AttentionTile, rank_spans, visible_tiles


def ring_attend(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    *,
    group: dist.ProcessGroup | None,
    window: int | None,
    dropout: float = 0.0,
    scale: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """`attend` over all positions of the sequence, of which each rank of `group` (None: all) has
    `rank_spans`: `[B, S, H · D]`.

    Collective, with the same number of positions per rank. Dropout draws its masks per tile, seeded
    from torch's generator: other masks than in one process, and slow, since no kernel takes them.
    """
    group = group or dist.group.WORLD
    assert group is not None
    scale = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    seed = int(torch.randint(1 << 48, ())) if dropout else 0
    documents_number = None if documents is None or documents.whole else documents.number
    options = (group.group_name, documents_number, window, scale, dropout, seed)
    out_BSHD: Tensor = _ring_attention(q_BSHD, k_BSHD, v_BSHD, *options)[0]
    return out_BSHD.flatten(-2)


@torch.library.custom_op(
    "orrery::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, str group, int? documents, int? window, float scale, "
    "float dropout, "
    "int seed) -> (Tensor, Tensor)",
)
def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: str,
    documents: int | None,
    window: int | None,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Merged output `[B, S, H, D of v]` and log-sum-exp `[B, H, S]` of queries, keys and values
    `[B, S, H, D]`.
    """
    ring, wide = (
        _Ring(_group(group), q.shape[1], window, documents),
        _accumulated(q),
    )
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=wide, device=q.device)
    queries, sums = q.transpose(1, 2), out.transpose(1, 2)
    lse = torch.full(queries.shape[:3], -torch.inf, dtype=wide, device=q.device)
    carried = [k.contiguous(), v.contiguous()]
    for step in range(ring.size):
        transfer = ring.pass_on(carried) if step + 1 < ring.size else None
        keys, values = (x.transpose(1, 2) for x in carried)
        for batch, tile in ring.tiles(step):
            rows, columns = tile.queries, tile.keys
            causal, seen = ring.mask(tile, q.device)
            part = block_forward(
                queries[batch, :, rows],
                keys[batch, :, columns],
                values[batch, :, columns],
                causal=causal,
                seen_QK=seen,
                scale=scale,
                dropout_BHQK=_dropout_mask(queries, batch, tile, dropout, seed + step),
            )
            _merge(sums[batch, :, rows], lse[batch, :, rows], *part)
        if transfer is not None:
            carried = transfer.wait()
    return out.to(q.dtype), lse


@torch.library.custom_op(
    "orrery::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str group, int? "
    "documents, "
    "int? window, float scale, float dropout, int seed) -> (Tensor, Tensor, Tensor)",
)
def _ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    documents: int | None,
    window: int | None,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, `[B, S, H, D]`.

    Keys and values go around once more; the sums of their gradients follow one step behind, in
    fp32, from the first rank that adds to them back to their owner.
    """
    ring, wide = (
        _Ring(_group(group), q.shape[1], window, documents),
        _accumulated(q),
    )
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    slopes, queries, outs, dqs = (x.transpose(1, 2) for x in (grad, q, out, dq))
    own: list[Tensor] = []
    returning: _Transfer | None = None
    carried = [k.contiguous(), v.contiguous()]
    for step in range(ring.size):
        transfer = ring.pass_on(carried) if step + 1 < ring.size else None
        keys, values = (x.transpose(1, 2) for x in carried)
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in carried]
        dks, dvs = (x.transpose(1, 2) for x in sums)
        for batch, tile in ring.tiles(step):
            rows, columns = tile.queries, tile.keys
            causal, seen = ring.mask(tile, q.device)
            parts = block_backward(
                slopes[batch, :, rows],
                queries[batch, :, rows],
                keys[batch, :, columns],
                values[batch, :, columns],
                outs[batch, :, rows],
                lse[batch, :, rows],
                causal=causal,
                seen_QK=seen,
                scale=scale,
                dropout_BHQK=_dropout_mask(queries, batch, tile, dropout, seed + step),
            )
            places = (dqs[batch, :, rows], dks[batch, :, columns], dvs[batch, :, columns])
            for total, part in zip(places, parts, strict=True):
                total += part
        if step == 0:
            own = sums  # stay here; those of other ranks' keys return to them
        else:
            returning = ring.pass_on(_add(sums, returning))
        if transfer is not None:
            carried = transfer.wait()
    dk, dv = _add(own, returning)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch, local, heads, _ = q.shape
    out = q.new_empty(batch, local, heads, v.shape[-1])
    return out, q.new_empty(batch, heads, local, dtype=_accumulated(q))


@_ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.documents = (
        None if ctx.options[1] is None else Documents.of(ctx.options[1])
    )  # alive until the backward pass
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _ring_attention_backward(grads[0], *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, *[None] * len(ctx.options)


_ring_attention.register_autograd(_backward, setup_context=_save)


class _Ring:
    """The ranks of a group in a ring, for one attention over `local` positions per rank."""

    def __init__(
        self, group: dist.ProcessGroup, local: int, window: int | None, documents: int | None
    ) -> None:
        self.group, self.window = group, window
        self.starts = None if documents is None else Documents.of(documents).starts
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.spans = [rank_spans(local * self.size, self.size, rank) for rank in range(self.size)]

    def tiles(self, step: int) -> list[tuple[slice, AttentionTile]]:
        """Batch rows and tiles of this rank's queries with the keys it has after `step` steps."""
        queries, keys = self.spans[self.rank], self.spans[(self.rank - step) % self.size]
        if self.starts is None:
            return [(slice(None), tile) for tile in visible_tiles(queries, keys, self.window)]
        rows = enumerate(self.starts)
        return [
            (slice(row, row + 1), tile)
            for row, starts in rows
            for tile in visible_tiles(queries, keys, self.window, starts)
        ]

    def mask(self, tile: AttentionTile, device: torch.device) -> tuple[bool, Tensor | None]:
        """Whether the tile is causal, and its mask `[Q, K]` if that does not define it."""
        if tile.kind == "documents":
            return False, AttentionChunk(tile.queries, tile.keys, tile.starts).seen(device)
        if tile.kind != "window":
            return tile.kind == "causal", None
        assert self.window is not None
        queries = torch.arange(tile.queries.stop - tile.queries.start, device=device)
        keys = torch.arange(tile.keys.stop - tile.keys.start, device=device)
        distance = queries[:, None] + tile.ahead - keys[None, :]
        return False, (distance >= 0) & (distance < self.window)

    def pass_on(self, tensors: list[Tensor]) -> _Transfer:
        """Start sending to the next rank and receiving from the previous one."""
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        previous = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        received = [torch.empty_like(tensor) for tensor in tensors]
        sends = [dist.P2POp(dist.isend, tensor, following, self.group) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, previous, self.group) for tensor in received]
        return _Transfer(dist.batch_isend_irecv([*sends, *receives]), tensors, received)


class _Transfer:
    """A pending exchange; keeps the sent tensors alive until `wait`."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self.works, self.sent, self.received = works, sent, received

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _add(sums: list[Tensor], transfer: _Transfer | None) -> list[Tensor]:
    if transfer is not None:
        for total, more in zip(sums, transfer.wait(), strict=True):
            total += more
    return sums


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over more keys, in place, weighted by log-sum-exp (arXiv 2307.08691, section
    3.1).
    """
    merged = torch.logaddexp(lse, part_lse)
    out *= (lse - merged).exp().unsqueeze(-1)
    out += part * (part_lse - merged).exp().unsqueeze(-1)
    lse.copy_(merged)


def _dropout_mask(
    queries_BHSD: Tensor, some: slice, tile: AttentionTile, dropout: float, seed: int
) -> Tensor | None:
    """The dropout mask of a tile, `[B, H, Q, K]`: 0, or 1 / (1 - dropout); the same each time."""
    if not dropout:
        return None
    rows, columns = tile.queries, tile.keys
    batch, heads, local, _ = queries_BHSD[some].shape
    shape = (batch, heads, rows.stop - rows.start, columns.stop - columns.start)
    first = (some.start or 0) * local
    place = (
        (first + rows.start) * local + columns.start
    ) << 8  # distinct from other tiles and steps
    generator = torch.Generator(queries_BHSD.device).manual_seed(seed + place)
    uniform = torch.rand(shape, generator=generator, device=queries_BHSD.device)
    return (uniform >= dropout) / (1 - dropout)


def _group(name: Any) -> dist.ProcessGroup:
    """The process group of that name; operators cannot take the group itself."""
    return _resolve_process_group(name)


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
