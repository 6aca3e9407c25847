"""Drafts by a smaller model that reads the same tokens, with a cache of its own under the target's
block tables.

A block of the target's has a twin here; how much of the twin is computed is known block by block,
so that prefixes are
shared, copied and given back with the target's and whatever is missing is caught up on. Knows no
acceptance.
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
from workers.inference.speculate.proposal import Proposed

_CATCH_UP = 2048  # tokens of a pass


class ModelDraft:
    """`runner` runs the draft model over a cache of as many blocks as the target's `pool`.

    A draft is greedy where its request is, else drawn with the request's own temperature, cuts and
    penalties at uniform
    numbers of seed and place: the same tokens give the same draft.
    """

    reads = True

    def __init__(self, runner: Runner, pool: BlockPool, *, context: int) -> None:
        self.runner, self.pool, self.context = runner, pool, context
        # use of the block, tokens of it that are computed here
        self._filled = [(0, 0)] * pool.blocks

    def window(self, window: int | None) -> int | None:
        own = self.runner.decoder.spec.window
        return None if own is None or window is None else max(own, window)

    def room(self, request: Request, most: int) -> int:
        return max(0, min(most, self.context - len(request.tokens)))

    def forget(self, request: Request) -> None:
        """Blocks are the pool's to forget."""

    def propose(self, scheduled: Sequence[ScheduledTokens], drafting: Sequence[ScheduledTokens]) -> Proposed:
        self._follow(scheduled)
        if not drafting:
            return Proposed()
        left, first, late = _CATCH_UP, [], []
        for each in drafting:
            known = self._known(each)
            count = min(each.start + 1 - known, left)
            reaches = known + count > each.start
            left -= count
            if not reaches:
                late.append(each)
            if count:
                first.append(ScheduledTokens(each.request, known, count, num_logits=int(reaches)))
        passes: list[tuple[int, float]] = []
        shares: dict[Request, list[Tensor]] = {}
        for each in drafting:
            each.request.draft = []
        drafting = [each for each in drafting if each not in late]
        for place in range(max((each.num_drafts for each in drafting), default=0)):
            active = [each for each in drafting if each.num_drafts > place]
            now = (
                first
                if not place
                else [ScheduledTokens(each.request, each.start + place, 1, num_logits=1) for each in active]
            )
            began = time.perf_counter()
            self._pass(now, [each.request for each in active], shares)
            tokens = sum(each.count for each in now)
            if tokens <= 2 * len(now):  # not where it had to catch up on more than the last token
                passes.append((tokens, time.perf_counter() - began))
        if not drafting and first:
            self._pass(first, [], shares)
        drawn_from = {request: torch.stack(rows) for request, rows in shares.items()}
        return Proposed(drawn_from, frozenset(each.request for each in late), tuple(passes))

    def _pass(
        self,
        scheduled: Sequence[ScheduledTokens],
        requests: Sequence[Request],
        shares: dict[Request, list[Tensor]],
    ) -> None:
        logits_SV = self.runner.run(StepPlan(tuple(scheduled)))
        for each in scheduled:
            self._fill(each)
        if not requests:
            return
        rows = [Row(request, len(request.draft)) for request in requests]
        adjusted_SV = adjust_logits(logits_SV, rows)
        tokens: list[int] = adjusted_SV.argmax(-1).tolist()
        drawn = [number for number, row in enumerate(rows) if not row.request.sampling.greedy]
        if drawn:
            asked = [rows[number] for number in drawn]
            shares_SV = compute_weights(adjusted_SV[drawn], asked)
            shares_SV /= shares_SV.sum(-1, keepdim=True)
            found = sample_at(shares_SV, [row.uniform("draft") for row in asked])
            for number, token, share_V in zip(drawn, found, shares_SV.unbind(), strict=True):
                tokens[number] = token
                shares.setdefault(requests[number], []).append(share_V)
        for request, token in zip(requests, tokens, strict=True):
            request.draft.append(token)

    def _follow(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """What the step is about to write is not known here any more; what it copies is copied here
        too.
        """
        page = self.pool.block_size
        pairs = [
            each.copy for each in scheduled if each.copy is not None and self._tokens_in(each.copy[0])
        ]
        self.runner.cache.copy(pairs)
        for source, target in pairs:
            self._filled[target] = (self.pool.uses(target), self._tokens_in(source))
        for each in scheduled:
            for place in range(each.start // page, -(-(each.start + each.count) // page)):
                block = each.request.blocks[place]
                kept = min(self._tokens_in(block), max(0, each.start - place * page))
                self._filled[block] = (self.pool.uses(block), kept)

    def _known(self, given: ScheduledTokens) -> int:
        """Of the tokens before a slice those that are in this cache, from the first on without a
        gap.
        """
        page, known = self.pool.block_size, 0
        for place, block in enumerate(given.request.blocks[: -(-given.start // page)]):
            held = page if place < given.request.freed_blocks else self._tokens_in(block)
            known += held
            if held < page:
                break
        return min(known, given.start)

    def _fill(self, given: ScheduledTokens) -> None:
        page, end = self.pool.block_size, given.start + given.count
        for place in range(given.start // page, -(-end // page)):
            block = given.request.blocks[place]
            self._filled[block] = (self.pool.uses(block), min(page, end - place * page))
        given.request.draft_computed = end

    def _tokens_in(self, block: int) -> int:
        use, tokens = self._filled[block]
        return tokens if use == self.pool.uses(block) else 0
