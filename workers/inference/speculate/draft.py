"""Drafts by a smaller model with its own cache under the target's block tables.

Each block of the target has a twin in the draft's cache. The number of computed tokens is tracked
per block, so that prefixes are shared, copied and freed with the target's, and missing tokens are
computed later. Does not depend on acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampling.sampler import Row, adjust_logits, compute_weights, sample_at
from workers.inference.scheduling.step_plan import ScheduledTokens, StepPlan
from workers.inference.speculate.proposal import Proposal

_CATCH_UP = 2048  # tokens per pass


class ModelDraft:
    """`runner` runs the draft model over a cache of as many blocks as the target's `pool`.

    A draft is greedy if its request is, else sampled with the request's parameters and uniform
    numbers of seed and position: the same tokens give the same draft.
    """

    reads = True

    def __init__(self, runner: Runner, pool: BlockPool, *, context: int) -> None:
        self.runner, self.pool, self.context = runner, pool, context
        # use of the block, and how many of its tokens are computed here
        self._filled = [(0, 0)] * pool.blocks

    def window(self, window: int | None) -> int | None:
        """The larger of both models' attention windows."""
        own = self.runner.decoder.spec.window
        return None if own is None or window is None else max(own, window)

    def count_drafts(self, request: Request, most: int) -> int:
        """At most `most`, limited by the draft model's context."""
        return max(0, min(most, self.context - len(request.tokens)))

    def forget(self, request: Request) -> None:
        """Do nothing: the pool frees the blocks."""

    def propose(
        self, scheduled: Sequence[ScheduledTokens], drafting: Sequence[ScheduledTokens]
    ) -> Proposal:
        """Compute the drafts in as many passes as the longest one has tokens."""
        self._sync_blocks(scheduled)
        if not drafting:
            return Proposal()
        left, first, late = _CATCH_UP, [], []
        for part in drafting:
            known = self._computed_before(part)
            count = min(part.start + 1 - known, left)
            reaches = known + count > part.start
            left -= count
            if not reaches:
                late.append(part)
            if count:
                first.append(ScheduledTokens(part.request, known, count, num_logits=int(reaches)))
        passes: list[tuple[int, float]] = []
        probs: dict[Request, list[Tensor]] = {}
        for part in drafting:
            part.request.draft = []
        drafting = [part for part in drafting if part not in late]
        for offset in range(max((part.num_drafts for part in drafting), default=0)):
            active = [part for part in drafting if part.num_drafts > offset]
            batch = (
                first
                if not offset
                else [
                    ScheduledTokens(part.request, part.start + offset, 1, num_logits=1)
                    for part in active
                ]
            )
            began = time.perf_counter()
            self._pass(batch, [part.request for part in active], probs)
            tokens = sum(part.count for part in batch)
            if tokens <= 2 * len(batch):  # do not measure passes that catch up
                passes.append((tokens, time.perf_counter() - began))
        if not drafting and first:
            self._pass(first, [], probs)
        draft_probs = {request: torch.stack(rows) for request, rows in probs.items()}
        return Proposal(draft_probs, frozenset(part.request for part in late), tuple(passes))

    def _pass(
        self,
        scheduled: Sequence[ScheduledTokens],
        requests: Sequence[Request],
        probs: dict[Request, list[Tensor]],
    ) -> None:
        logits_SV = self.runner.run(StepPlan(tuple(scheduled)))
        for part in scheduled:
            self._mark_computed(part)
        if not requests:
            return
        rows = [Row(request, len(request.draft)) for request in requests]
        adjusted_SV = adjust_logits(logits_SV, rows)
        tokens: list[int] = adjusted_SV.argmax(-1).tolist()
        sampled = [number for number, row in enumerate(rows) if not row.request.sampling.greedy]
        if sampled:
            sampled_rows = [rows[number] for number in sampled]
            probs_SV = compute_weights(adjusted_SV[sampled], sampled_rows)
            probs_SV /= probs_SV.sum(-1, keepdim=True)
            ids = sample_at(probs_SV, [row.uniform("draft") for row in sampled_rows])
            for number, token, probs_V in zip(sampled, ids, probs_SV.unbind(), strict=True):
                tokens[number] = token
                probs.setdefault(requests[number], []).append(probs_V)
        for request, token in zip(requests, tokens, strict=True):
            request.draft.append(token)

    def _sync_blocks(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """Follow the target's blocks: copy what it copies, invalidate what the step overwrites."""
        page = self.pool.block_size
        pairs = [
            part.copy
            for part in scheduled
            if part.copy is not None and self._tokens_in(part.copy[0])
        ]
        self.runner.cache.copy(pairs)
        for source, target in pairs:
            self._filled[target] = (self.pool.uses(target), self._tokens_in(source))
        for part in scheduled:
            for index in range(part.start // page, -(-(part.start + part.count) // page)):
                block = part.request.blocks[index]
                valid = min(self._tokens_in(block), max(0, part.start - index * page))
                self._filled[block] = (self.pool.uses(block), valid)

    def _computed_before(self, part: ScheduledTokens) -> int:
        """How many tokens before `part` are in this cache, from the first one without a gap."""
        page, total = self.pool.block_size, 0
        for index, block in enumerate(part.request.blocks[: -(-part.start // page)]):
            computed = page if index < part.request.freed_blocks else self._tokens_in(block)
            total += computed
            if computed < page:
                break
        return min(total, part.start)

    def _mark_computed(self, part: ScheduledTokens) -> None:
        page, end = self.pool.block_size, part.start + part.count
        for index in range(part.start // page, -(-end // page)):
            block = part.request.blocks[index]
            self._filled[block] = (self.pool.uses(block), min(page, end - index * page))
        part.request.draft_computed = end

    def _tokens_in(self, block: int) -> int:
        use, tokens = self._filled[block]
        return tokens if use == self.pool.uses(block) else 0
