"""Continuous batching: which tokens of which requests the next step computes, and where their keys
and values go.

Pure Python over the block pool; knows no tensors and no model. Iteration-level scheduling after
Orca (OSDI 2022),
chunked prefill after Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass, replace

from workers.inference.blocks import BlockPool
from workers.inference.cpu_swap import Costs, HostBlocks, Swaps
from workers.inference.fair_queue import Turns
from workers.inference.request import Request
from workers.inference.step import Slice, StepPlan

AGING_STEPS = 1000
"""A step of priority is worth so many steps of waiting: one of low priority waits long, and not for ever."""

NO_BLOCK = -1  # where a request's block is given back


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one step: query tokens and sequences. `watermark` is the share of blocks that admission
    leaves free, so that
    requests that run already can go on without preempting at once."""

    step_tokens: int = 2048
    sequences: int = 16
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.step_tokens < 1 or self.sequences < 1 or not 0 <= self.watermark < 1:
            raise ValueError(
                f"{self} computes nothing; step_tokens and sequences want at least 1, watermark 0 "
                "to 1"
            )


class Scheduler:
    """Higher priority first, then first come, first served. Requests run until they end; when
    blocks run out the last
    of them gives all of its back. Its full blocks go to CPU memory where that costs less than
    computing them again,
    which is done with the rest, its answer so far included. The first always goes on, so every
    request ends.

    First come counts by client (`turns`): one that sends many requests at a time has each placed
    behind the one before.
    A `window` of tokens is all that any layer sees: blocks before it are given back, with
    `read_twice` no further than
    a draft model has read. `swap` are places in CPU memory. With `groups` more than 1 so many steps
    may be under way,
    begun and done in turn, each with its part of the requests: a request that is `flying` in one is
    in no other, and
    keeps its blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        window: int | None = None,
        swap: HostBlocks | None = None,
    ) -> None:
        self.pool, self.limits, self.window = pool, limits, window
        self.turns = Turns(seats=limits.sequences, step_tokens=limits.step_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.read_twice = False
        self.steps = self.preemptions = 0
        self._slices: dict[Request, Slice] = {}
        self._budget = 0
        self._swaps = Swaps(pool, swap)
        self.groups = 1
        self.flying: set[Request] = set()

    @property
    def costs(self) -> Costs:
        return self._swaps.costs

    @costs.setter
    def costs(self, costs: Costs) -> None:
        self._swaps.costs = costs

    @property
    def swaps(self) -> int:
        """Blocks that went to CPU memory."""
        return self._swaps.total

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that could not run alone."""
        needed = self.pool.blocks_for(len(request.prompt) + request.sampling.max_new_tokens)
        if needed > self.pool.blocks:
            message = (
                f"a prompt of {len(request.prompt)} and {request.sampling.max_new_tokens} new "
                "tokens"
            )
            raise ValueError(
                f"{message} want {needed} blocks, the cache has {self.pool.blocks}; ask for fewer"
            )
        asked, most = request.sampling, self.limits.sequences
        if asked.sequences > most:
            name = "n" if asked.n == asked.sequences else "beams"
            raise ValueError(f"{name} is {asked.sequences}; at most {most} sequences run at a time")
        if (
            asked.beams > 1
            and asked.beams * needed > (1 - self.limits.watermark) * self.pool.blocks
        ):
            message = (
                f"{asked.beams} beams want {asked.beams * needed} blocks at a time, the cache "
                f"has {self.pool.blocks}"
            )
            raise ValueError(f"{message}; ask for fewer beams or tokens")
        request.arrival = self.turns.came(
            request.client,
            priority=request.priority,
            now=self.steps,
            waits=self._row_waits(request),
            prompt=len(request.prompt),
            most=asked.max_new_tokens,
            sequences=asked.sequences,
            latest=AGING_STEPS - 1,
        )
        insort(self.waiting, request, key=_rank)

    def fork(self, request: Request, children: list[Request]) -> None:
        """Let `children` go on from where `request` is computed, on the same blocks; of one that
        waits they wait too.

        Not between plan and done.
        """
        for child in children:
            child.blocks, child.computed, child.gone = (
                list(request.blocks),
                request.computed,
                request.gone,
            )
            child.client, child.priority, child.arrival = (
                request.client,
                request.priority,
                request.arrival,
            )
            child.shared_tokens = request.computed
            self.pool.share(child.blocks[child.gone :])
        if request not in self.running:
            for child in children:
                insort(self.waiting, child, key=_rank)
            return
        place = self.running.index(request) + 1
        self.running[place:place] = children

    def remove(self, request: Request) -> None:
        """A request that ended or was aborted: its blocks are free. Not between plan and done."""
        if request.finish in ("stop", "length"):
            self.turns.ended(len(request.new_tokens))
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def plan(self) -> StepPlan:
        """The next step, its blocks taken; `done` has to follow once it is computed."""
        self._slices, self._budget = {}, self.limits.step_tokens
        self._swaps.begin()
        self.steps += 1
        preempted: list[Request] = []
        for request in sorted(self.running, key=lambda each: (not each.decodes, _rank(each))):
            if not self._open or request in self.flying:
                continue
            if request.pending and request in self.running and not request.finish:
                preempted += self._go_on(request)
        if not preempted:
            preempted = self._admit()
            self._add_drafts()
        self.flying.update(self._slices)
        return StepPlan(
            tuple(self._slices.values()),
            tuple(preempted),
            tuple(self._swaps.outs),
            tuple(self._swaps.ins),
        )

    def done(self, plan: StepPlan) -> None:
        """The step is computed: full blocks may be shared from now on, but for what is drafted
        (`accept`).
        """
        for each in plan.slices:
            self._computed(each.request, each.start + each.count - each.drafts)
            self.flying.discard(each.request)
        self._swaps.stepped()

    def took(self, plan: StepPlan, seconds: float) -> None:
        """How long the step was computed, for the choice between swapping and computing again."""
        prompt = sum(each.count for each in plan.slices if each.count > 1 + each.drafts)
        if 2 * prompt > plan.tokens:
            self.costs.computed(plan.tokens, seconds)

    def accept(self, request: Request, drafts: int) -> None:
        """So many drafted tokens of the step have become the request's own; blocks of the others
        are given back.
        """
        self._computed(request, request.computed + drafts)
        needed = self.pool.blocks_for(len(request.tokens))
        self.pool.release(request.blocks[needed:])
        del request.blocks[needed:]

    def _computed(self, request: Request, tokens: int) -> None:
        page = self.pool.block_size
        already, request.computed = request.computed // page, tokens
        full = tokens // page
        keys = request.keys(full, page)
        for place in range(already, full):
            self.pool.seal(request.blocks[place], keys[place])
        if self.window is not None:
            left = min(tokens, request.read) if self.read_twice else tokens
            # the next query sees keys from left + 1 - window on
            gone = max(0, left + 1 - self.window) // page
            self.pool.release(request.blocks[request.gone : gone])
            request.blocks[request.gone : gone] = [NO_BLOCK] * max(0, gone - request.gone)
            request.gone = max(gone, request.gone)

    def _go_on(self, request: Request) -> list[Request]:
        """Give a running request its part of the step; returns who was preempted for it, perhaps
        itself.
        """
        preempted: list[Request] = []
        count = min(request.pending, self._budget)
        while self._blocks_wanted(request, count) > self.pool.free:
            if self.flying:
                return preempted  # blocks come back, or are taken, once nothing is under way
            victim = max(self.running, key=_rank)
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return preempted
        self._give(request, count)
        return preempted

    def _admit(self) -> list[Request]:
        """Let in who waits, in turn, as long as there is room; returns who was preempted for the
        sake of priority.
        """
        pool, page = self.pool, self.pool.block_size
        preempted: list[Request] = []
        coming = {key for each in self.running for key in self._coming(each)}
        for request in list(self.waiting):
            # the last token is computed in any case: its logits are what is wanted
            keys = request.keys((len(request.tokens) - 1) // page, page)
            found = pool.find(keys)
            missing = keys[len(found) :]
            common = next(
                (place for place, key in enumerate(missing) if key not in coming), len(missing)
            )
            if common and 2 * common * page >= len(request.tokens) - len(found) * page:
                continue  # another computes most of it in this step
            if self._open and not self._room(request, found):
                preempted += self._made_room(request, found)
                found = pool.find(keys)
            if not self._open or not self._room(request, found):
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.admitted_s = request.admitted_s or time.perf_counter()
            pool.share(found)
            request.blocks, request.computed = found, len(found) * page
            self._swaps.bring_in(request, keys[len(found) :])
            if not request.preemptions:
                request.shared_tokens = request.computed
            self._give(request, min(request.pending, self._budget))
            coming.update(self._coming(request))
            if preempted:
                break
        return preempted

    def _room(self, request: Request, found: list[int]) -> bool:
        """Seats and blocks for a request whose beginning is `found`, beside what prompts in chunks
        still take.
        """
        pool = self.pool
        spare = int(self.limits.watermark * pool.blocks) if self.running else 0
        owed = sum(self._still_wanted(each) for each in self.running)
        seats = self.limits.sequences - sum(self._seats(each) for each in self.running)
        new = pool.blocks_for(len(request.tokens)) - len(found)
        return (
            self._seats(request) <= seats
            and pool.free - pool.would_take(found) - owed - new >= spare
        )

    def _made_room(self, request: Request, found: list[int]) -> list[Request]:
        """Preempt those of lower priority that are behind it, the last first, if that makes room."""
        behind = [
            each
            for each in self.running
            if each.priority < request.priority and _rank(each) > _rank(request)
        ]
        behind = [each for each in behind if each not in self.flying]
        behind.sort(key=_rank, reverse=True)
        left = [each for each in self.running if each not in behind]
        held = {block for each in left for block in each.blocks[each.gone :]} | set(found)
        seats = self.limits.sequences - sum(self._seats(each) for each in left)
        owed = sum(self._still_wanted(each) for each in left)
        new = self.pool.blocks_for(len(request.tokens)) - len(found)
        if not behind or self._seats(request) > seats or self.pool.blocks - len(held) - owed < new:
            return []
        preempted: list[Request] = []
        while behind and not self._room(
            request, self.pool.find(request.keys(len(found), self.pool.block_size))
        ):
            preempted.append(behind.pop(0))
            self._preempt(preempted[-1])
        return preempted

    @property
    def _open(self) -> bool:
        """Whether the step takes more: tokens, and requests up to its part of them."""
        part = -(-min(len(self.running) + len(self.waiting), self.limits.sequences) // self.groups)
        return self._budget > 0 and (self.groups == 1 or len(self._slices) < part)

    def _coming(self, request: Request) -> list[bytes]:
        """Keys of the full blocks of a prompt that are not computed yet."""
        if request.decodes:
            return []
        page = self.pool.block_size
        return request.keys(len(request.tokens) // page, page)[request.computed // page :]

    def _give(self, request: Request, count: int) -> None:
        page, blocks = self.pool.block_size, request.blocks
        copy: tuple[int, int] | None = None
        place = request.computed // page
        if place < len(blocks):
            before, blocks[place] = blocks[place], self.pool.own(blocks[place])
            copy = (before, blocks[place]) if before != blocks[place] else None
        while len(blocks) * page < request.computed + count:
            blocks.append(self.pool.take())
        wants = int(count == request.pending)
        self._slices[request] = Slice(request, request.computed, count, copy, wants)
        self._budget -= count

    def _add_drafts(self) -> None:
        """Places for drafted tokens, out of what is left of the step and of free blocks: nobody
        gives way to them.
        """
        pool, page = self.pool, self.pool.block_size
        for request, given in self._slices.items():
            if not (request.wish and given.samples and request.decodes):
                continue
            end = given.start + given.count
            held = len(request.blocks) * page - end
            more = min(pool.blocks_for(max(0, request.wish - held)), pool.free)
            drafts = min(request.wish, self._budget, held + more * page)
            while len(request.blocks) * page < end + drafts:
                request.blocks.append(pool.take())
            self._slices[request] = replace(given, count=given.count + drafts, wants=1 + drafts)
            self._budget -= drafts

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
        self._swaps.put_out(victim)
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, victim, key=_rank)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks[request.gone :])
        request.blocks, request.computed, request.gone, request.read = [], 0, 0, 0

    def _row_waits(self, request: Request) -> bool:
        return any(
            each.client == request.client and each.priority == request.priority
            for each in self.waiting
        )

    def _seats(self, request: Request) -> int:
        """A prompt that several answers will share keeps their seats until it is forked."""
        return request.sampling.sequences if len(request.tokens) == len(request.prompt) else 1


def _rank(request: Request) -> tuple[float, int]:
    """The lower goes first; of two requests always the same one, however long both wait."""
    return request.arrival - AGING_STEPS * request.priority, request.number
