"""Ring attention (arXiv 2310.01889): keys and values travel round the ranks that hold a sequence,
queries stay.

One operator of torch's, so that recomputation can keep its result and the ring turns once. Does not
know models.
Shapes: B batch, S positions held here, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.layers.block_attention import block_backward, block_forward
from workers.models.layers.documents import Documents, AttentionChunk
from workers.training.parallel.context.ring_chunks import AttentionTile, held_spans, visible_tiles

_groups: dict[str, dist.ProcessGroup] = {}  # by name, which is what an operator can be given


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
    """`attend` over all positions of the sequence, of which each rank of `group` (None: all) holds
    `held_spans`:
    `[B, S, H · D]`.

    Every rank calls it at the same time with as many positions. Dropout draws its masks by block,
    from a seed that
    torch's generator gives: other masks than one process has, and slow, since no kernel takes them.
    """
    group = group or dist.group.WORLD
    assert group is not None
    _groups[group.group_name] = group
    scale = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    seed = int(torch.randint(1 << 48, ())) if dropout else 0
    packed = None if documents is None or documents.whole else documents.number
    how = (group.group_name, packed, window, scale, dropout, seed)
    out_BSHD: Tensor = _ring_attention(q_BSHD, k_BSHD, v_BSHD, *how)[0]
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
    ring, wide = _Ring(_groups[group], q.shape[1], window, documents), _accumulated(q)
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=wide, device=q.device)
    queries, sums = q.transpose(1, 2), out.transpose(1, 2)
    lse = torch.full(queries.shape[:3], -torch.inf, dtype=wide, device=q.device)
    carried = [k.contiguous(), v.contiguous()]
    for step in range(ring.size):
        arriving = ring.pass_on(carried) if step + 1 < ring.size else None
        keys, values = (x.transpose(1, 2) for x in carried)
        for some, block in ring.blocks(step):
            rows, columns = block.queries, block.keys
            causal, seen = ring.mask(block, q.device)
            part = block_forward(
                queries[some, :, rows],
                keys[some, :, columns],
                values[some, :, columns],
                causal=causal,
                seen_QK=seen,
                scale=scale,
                kept_BHQK=_kept(queries, some, block, dropout, seed + step),
            )
            _merge(sums[some, :, rows], lse[some, :, rows], *part)
        if arriving is not None:
            carried = arriving.wait()
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
    """Gradients of queries, keys and values, `[B, S, H, D]`. Keys and values go round once more;
    the sums of their
    gradients follow them one step behind, in fp32, from the first rank that adds to them back to
    their owner.
    """
    ring, wide = _Ring(_groups[group], q.shape[1], window, documents), _accumulated(q)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    slopes, queries, outs, dqs = (x.transpose(1, 2) for x in (grad, q, out, dq))
    own: list[Tensor] = []
    returning: _Arriving | None = None
    carried = [k.contiguous(), v.contiguous()]
    for step in range(ring.size):
        arriving = ring.pass_on(carried) if step + 1 < ring.size else None
        keys, values = (x.transpose(1, 2) for x in carried)
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in carried]
        dks, dvs = (x.transpose(1, 2) for x in sums)
        for some, block in ring.blocks(step):
            rows, columns = block.queries, block.keys
            causal, seen = ring.mask(block, q.device)
            parts = block_backward(
                slopes[some, :, rows],
                queries[some, :, rows],
                keys[some, :, columns],
                values[some, :, columns],
                outs[some, :, rows],
                lse[some, :, rows],
                causal=causal,
                seen_QK=seen,
                scale=scale,
                kept_BHQK=_kept(queries, some, block, dropout, seed + step),
            )
            places = (dqs[some, :, rows], dks[some, :, columns], dvs[some, :, columns])
            for total, part in zip(places, parts, strict=True):
                total += part
        if step == 0:
            own = sums  # stay here; those of the other ranks' keys go home
        else:
            returning = ring.pass_on(_added(sums, returning))
        if arriving is not None:
            carried = arriving.wait()
    dk, dv = _added(own, returning)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    batch, held, heads, _ = q.shape
    out = q.new_empty(batch, held, heads, v.shape[-1])
    return out, q.new_empty(batch, heads, held, dtype=_accumulated(q))


@_ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.how = inputs
    ctx.documents = None if ctx.how[1] is None else Documents.of(ctx.how[1])  # alive until then
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _ring_attention_backward(grads[0], *ctx.saved_tensors, *ctx.how)
    return dq, dk, dv, *[None] * len(ctx.how)


_ring_attention.register_autograd(_backward, setup_context=_keep)


class _Ring:
    """The ranks of a group in a ring, for one attention over `held` positions a rank."""

    def __init__(
        self, group: dist.ProcessGroup, held: int, window: int | None, documents: int | None
    ) -> None:
        self.group, self.window = group, window
        self.starts = None if documents is None else Documents.of(documents).starts
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.spans = [held_spans(held * self.size, self.size, rank) for rank in range(self.size)]

    def blocks(self, step: int) -> list[tuple[slice, AttentionTile]]:
        """Of this rank's queries with the keys that it carries after `step` steps, for some rows of
        the batch each.
        """
        queries, keys = self.spans[self.rank], self.spans[(self.rank - step) % self.size]
        if self.starts is None:
            return [(slice(None), block) for block in visible_tiles(queries, keys, self.window)]
        rows = enumerate(self.starts)
        return [
            (slice(row, row + 1), block)
            for row, starts in rows
            for block in visible_tiles(queries, keys, self.window, starts)
        ]

    def mask(self, block: AttentionTile, device: torch.device) -> tuple[bool, Tensor | None]:
        """Whether the block is causal, and what each query sees where that does not say it, `[Q,
        K]`.
        """
        if block.kind == "documents":
            return False, AttentionChunk(block.queries, block.keys, block.starts).seen(device)
        if block.kind != "window":
            return block.kind == "causal", None
        assert self.window is not None
        queries = torch.arange(block.queries.stop - block.queries.start, device=device)
        keys = torch.arange(block.keys.stop - block.keys.start, device=device)
        distance = queries[:, None] + block.ahead - keys[None, :]
        return False, (distance >= 0) & (distance < self.window)

    def pass_on(self, tensors: list[Tensor]) -> _Arriving:
        """Send to the next rank and receive from the one before, without waiting."""
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        received = [torch.empty_like(tensor) for tensor in tensors]
        sends = [dist.P2POp(dist.isend, tensor, following, self.group) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in received]
        return _Arriving(dist.batch_isend_irecv([*sends, *receives]), tensors, received)


class _Arriving:
    """Tensors under way; holds on to what is being sent until `wait`."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self.works, self.sent, self.received = works, sent, received

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _added(sums: list[Tensor], arriving: _Arriving | None) -> list[Tensor]:
    if arriving is not None:
        for total, more in zip(sums, arriving.wait(), strict=True):
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


def _kept(
    queries_BHSD: Tensor, some: slice, block: AttentionTile, dropout: float, seed: int
) -> Tensor | None:
    """The dropout mask of a block in some rows, `[B, H, Q, K]`: 0, or 1 / (1 - dropout); the same
    whenever drawn.
    """
    if not dropout:
        return None
    rows, columns = block.queries, block.keys
    batch, heads, held, _ = queries_BHSD[some].shape
    shape = (batch, heads, rows.stop - rows.start, columns.stop - columns.start)
    first = (some.start or 0) * held
    place = ((first + rows.start) * held + columns.start) << 8  # apart from other blocks and steps
    generator = torch.Generator(queries_BHSD.device).manual_seed(seed + place)
    drawn = torch.rand(shape, generator=generator, device=queries_BHSD.device)
    return (drawn >= dropout) / (1 - dropout)


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
