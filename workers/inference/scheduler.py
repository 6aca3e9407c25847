"""Continuous batching: which tokens of which requests the next step computes, and where their keys and values go.

Pure Python over the block pool; knows no tensors and no model. Iteration-level scheduling after Orca (OSDI 2022),
chunked prefill after Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from workers.inference.blocks import BlockPool
from workers.inference.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one step: query tokens and sequences. `watermark` is the share of blocks that admission leaves free, so that
    requests that run already can go on without preempting at once."""

    step_tokens: int = 2048
    sequences: int = 16
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.step_tokens < 1 or self.sequences < 1 or not 0 <= self.watermark < 1:
            raise ValueError(f"{self} computes nothing; step_tokens and sequences want at least 1, watermark 0 to 1")


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `start` to `start + count` of a request. `copy` is a block's contents to be copied first: from, to."""

    request: Request
    start: int
    count: int
    copy: tuple[int, int] | None = None

    @property
    def samples(self) -> bool:
        """Whether the slice ends where the request's next token is wanted."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: decodes first, each request at most once. All copies come before all writes."""

    slices: tuple[Slice, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(each.count for each in self.slices)


class Scheduler:
    """First come, first served. Requests run until they end; when blocks run out the newest gives all of its back and
    is computed again later, its answer so far included. The oldest always goes on, so every request ends."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._slices: dict[Request, Slice] = {}
        self._budget = 0

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that could not run alone."""
        needed = self.pool.blocks_for(len(request.prompt) + request.sampling.max_new_tokens)
        if needed > self.pool.blocks:
            says = f"a prompt of {len(request.prompt)} and {request.sampling.max_new_tokens} new tokens"
            raise ValueError(f"{says} want {needed} blocks, the cache has {self.pool.blocks}; ask for fewer")
        if request.sampling.n > self.limits.sequences:
            raise ValueError(f"n is {request.sampling.n}; at most {self.limits.sequences} sequences run at a time")
        self.waiting.append(request)

    def fork(self, request: Request, children: list[Request]) -> None:
        """Let `children` go on from where `request` is computed, on the same blocks. Not between plan and done."""
        for child in children:
            child.blocks, child.computed = list(request.blocks), request.computed
            child.shared_tokens = request.computed
            self.pool.share(child.blocks)
        place = self.running.index(request) + 1
        self.running[place:place] = children

    def remove(self, request: Request) -> None:
        """A request that ended or was aborted: its blocks are free. Not between plan and done."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def plan(self) -> StepPlan:
        """The next step, its blocks taken; `done` has to follow once it is computed."""
        self._slices, self._budget = {}, self.limits.step_tokens
        preempted: list[Request] = []
        order = [each for each in self.running if each.decodes] + [each for each in self.running if not each.decodes]
        for request in order:
            if self._budget and request in self.running and not request.finish:
                preempted += self._go_on(request)
        if not preempted:
            self._admit()
        return StepPlan(tuple(self._slices.values()), tuple(preempted))

    def done(self, plan: StepPlan) -> None:
        """The step is computed: full blocks may be shared from now on."""
        page = self.pool.block_size
        for each in plan.slices:
            request = each.request
            already, request.computed = request.computed // page, each.start + each.count
            full = request.computed // page
            keys = request.keys(full, page)
            for place in range(already, full):
                self.pool.seal(request.blocks[place], keys[place])

    def _go_on(self, request: Request) -> list[Request]:
        """Give a running request its part of the step; returns who was preempted for it, perhaps itself."""
        preempted: list[Request] = []
        count = min(request.pending, self._budget)
        while self._blocks_wanted(request, count) > self.pool.free:
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return preempted
        self._give(request, count)
        return preempted

    def _admit(self) -> None:
        pool, page = self.pool, self.pool.block_size
        spare = int(self.limits.watermark * pool.blocks)
        owed = sum(self._still_wanted(each) for each in self.running)
        seats = self.limits.sequences - sum(self._seats(each) for each in self.running)
        while self.waiting and self._budget:
            request = self.waiting[0]
            # the last token is computed in any case: its logits are what is wanted
            found = pool.find(request.keys((len(request.tokens) - 1) // page, page))
            new = pool.blocks_for(len(request.tokens)) - len(found)
            left = pool.free - pool.would_take(found) - owed - new
            if self._seats(request) > seats or left < (spare if self.running else 0):
                return
            self.waiting.popleft()
            self.running.append(request)
            pool.share(found)
            request.blocks, request.computed = found, len(found) * page
            if not request.preemptions:
                request.shared_tokens = request.computed
            self._give(request, min(request.pending, self._budget))
            owed += self._still_wanted(request)
            seats -= self._seats(request)

    def _give(self, request: Request, count: int) -> None:
        page, blocks = self.pool.block_size, request.blocks
        copy: tuple[int, int] | None = None
        place = request.computed // page
        if place < len(blocks):
            before, blocks[place] = blocks[place], self.pool.own(blocks[place])
            copy = (before, blocks[place]) if before != blocks[place] else None
        while len(blocks) * page < request.computed + count:
            blocks.append(self.pool.take())
        self._slices[request] = Slice(request, request.computed, count, copy)
        self._budget -= count

    def _blocks_wanted(self, request: Request, count: int) -> int:
        place = request.computed // self.pool.block_size
        copied = place < len(request.blocks) and self.pool.references(request.blocks[place]) > 1
        return self.pool.blocks_for(request.computed + count) - len(request.blocks) + copied

    def _still_wanted(self, request: Request) -> int:
        """Blocks that the rest of a prompt in chunks will take."""
        return max(0, self.pool.blocks_for(len(request.tokens)) - len(request.blocks))

    def _preempt(self, victim: Request) -> None:
        given = self._slices.pop(victim, None)
        if given is not None:
            self._budget += given.count
        self.running.remove(victim)
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0

    def _seats(self, request: Request) -> int:
        """A prompt that several answers will share keeps their seats until it is forked."""
        return request.sampling.n if len(request.tokens) == len(request.prompt) else 1
