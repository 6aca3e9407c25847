"""Continuous batching: which tokens of which requests the next step computes, and in which blocks.

Does not depend on tensors or the model. Iteration-level scheduling after Orca (OSDI 2022), chunked
prefill after Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

import sys
import time
from bisect import insort
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from workers.inference.adapters.adapter import Adapter
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.cpu_swap import CpuBlocks, Swapper
from workers.inference.request import Request
from workers.inference.scheduling import policy
from workers.inference.scheduling.block_tables import BlockTables
from workers.inference.scheduling.fair_queue import FairQueue
from workers.inference.scheduling.policy import Limits, order_key
from workers.inference.scheduling.preemption import Preemption
from workers.inference.scheduling.step_plan import ScheduledTokens, StepPlan

_MAX_SCORED = 512  # prompt tokens with logits in a step: each row has the vocabulary's width
_MAX_OVERTAKEN_STEPS = 64  # that a request waits for an adapter's slot while later ones start


class AdapterSlots(Protocol):
    """Places adapters in the model's memory."""

    def place(self, adapter: Adapter, *, running: Collection[Adapter]) -> bool:
        """Put an adapter into a slot; False if `running` ones use all slots."""
        ...


class Scheduler:
    """Higher priority first, then first come, first served, with fair shares among clients.

    Requests run until they finish. When blocks run out, the last in order is preempted. The first
    in order always continues, so every request finishes.

    `swap` are block slots in CPU memory. With `groups` above 1 that many steps may be in flight,
    started and finished in order, each with its part of the requests. A request is in one step at
    a time, and keeps its blocks until that step is finished.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        window: int | None = None,
        swap: CpuBlocks | None = None,
    ) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: deque[Request] = deque()  # in order
        self.running: list[Request] = []
        self.tables = BlockTables(pool, window=window)
        self.preemption = Preemption(self.tables, limits, self.running, self.waiting, swap)
        self.steps = 0
        self.groups = 1
        self.weight_version = 0
        self.adapters: AdapterSlots | None = None
        self.in_flight_requests: set[Request] = set()
        self._fair_queue = FairQueue(max_sequences=limits.sequences, step_tokens=limits.step_tokens)
        self._scheduled: dict[Request, ScheduledTokens] = {}
        self._budget = self._scored_budget = 0  # tokens

    @property
    def swapper(self) -> Swapper:
        """Swaps to and from CPU memory, and what they cost."""
        return self.preemption.swapper

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could not run even alone."""
        self._check_fits(request)
        request.take_weights(self.weight_version)
        sampling = request.sampling
        request.arrival = self._fair_queue.arrival_time(
            request.client,
            priority=request.priority,
            now=self.steps,
            is_waiting=self._flow_is_waiting(request),
            prompt_tokens=len(request.prompt),
            max_new_tokens=sampling.max_new_tokens,
            sequences=sampling.num_sequences,
            max_delay=policy.AGING_STEPS - 1,
        )
        insort(self.waiting, request, key=order_key)

    def fork(self, request: Request, children: list[Request]) -> None:
        """Let `children` continue from what `request` has computed, on the same blocks.

        Children of a waiting request wait, too. Not between `schedule` and `finish_step`.
        """
        for child in children:
            child.take_weights(request.weight_version)
            self.tables.fork(request, child)
            child.client, child.priority, child.arrival = (
                request.client,
                request.priority,
                request.arrival,
            )
        if request in self.running:
            place = self.running.index(request) + 1
            self.running[place:place] = children
        else:
            for child in children:
                insort(self.waiting, child, key=order_key)

    def remove(self, request: Request) -> None:
        """Free a finished or aborted request. Not between `schedule` and `finish_step`."""
        if request.finish in ("stop", "length"):
            self._fair_queue.record_output(len(request.output_tokens))
        if request in self.running:
            self.running.remove(request)
            self.tables.release(request)
        else:
            self.waiting.remove(request)

    def take_weights(self, version: int) -> None:
        """Recompute all keys and values with the weights of `version`: running requests wait again
        with their tokens, and no cached block is found any more. Not while a step is in flight.
        """
        assert not self.in_flight_requests
        for request in list(self.running):
            self.preemption.requeue(request)
        for request in self.waiting:
            request.take_weights(version)
        self.weight_version = version
        self.pool.forget()

    def schedule(self) -> StepPlan:
        """Plan the next step and take its blocks; `finish_step` has to follow."""
        self._scheduled, self._budget = {}, self.limits.step_tokens
        self._scored_budget = _MAX_SCORED
        self.swapper.begin_step()
        self.steps += 1
        preempted: list[Request] = []
        decodes_first = sorted(self.running, key=lambda r: (not r.is_decoding, order_key(r)))
        for request in decodes_first:
            if not self._has_budget or request in self.in_flight_requests:
                continue
            if request.pending and request in self.running and not request.finish:
                preempted += self._schedule_running(request)
        if not preempted:
            preempted = self._admit()
            self._add_drafts()
        self.in_flight_requests.update(self._scheduled)
        return StepPlan(
            tuple(sorted(self._scheduled.values(), key=_slot_order)),
            tuple(preempted),
            tuple(self.swapper.swap_outs),
            tuple(self.swapper.swap_ins),
        )

    def finish_step(self, plan: StepPlan) -> None:
        """Mark the step as computed: its full blocks can be shared, except drafts (`accept`)."""
        for part in plan.scheduled:
            self.tables.mark_computed(part.request, part.start + part.count - part.num_drafts)
            self.in_flight_requests.discard(part.request)
        self.swapper.finish_step()

    def record_step_time(self, plan: StepPlan, seconds: float) -> None:
        """Record a step's time, for the choice between swapping and recomputing."""
        prefill = sum(part.count for part in plan.scheduled if part.count > 1 + part.num_drafts)
        if 2 * prefill > plan.tokens:
            self.swapper.costs.record_prefill(plan.tokens, seconds)

    def accept(self, request: Request, drafts: int) -> None:
        """Make this many drafted tokens of the step the request's own; free the others' blocks."""
        self.tables.mark_computed(request, request.computed + drafts)
        self.tables.trim(request)

    def _schedule_running(self, request: Request) -> list[Request]:
        """Give a running request its part of the step; who was preempted for it, maybe itself."""
        preempted: list[Request] = []
        count = self._count(request)
        if not count:
            return preempted
        while self.tables.missing(request, count) > self.pool.free:
            if self.in_flight_requests:
                return preempted  # wait for the steps in flight, whose requests may free blocks
            victim = self.preemption.last()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return preempted
        self._schedule_tokens(request, count)
        return preempted

    def _admit(self) -> list[Request]:
        """Admit waiting requests in order while there is room; who was preempted for them."""
        pool, page = self.pool, self.pool.block_size
        preempted: list[Request] = []
        computing = {
            key for other in self.running for key in self.tables.uncomputed_prompt_keys(other)
        }
        for request in list(self.waiting):
            if request.scores_prompt and not self._scored_budget:
                continue
            # the last token is always computed: its logits are needed, as are those of a prompt
            # whose log-probabilities are wanted
            cacheable = len(request.tokens) - 1
            if request.scores_prompt:
                cacheable = len(request.prompt_scores)
            keys = request.block_keys(cacheable // page, page)
            prefix = pool.find(keys)
            missing = keys[len(prefix) :]
            shared = next(
                (place for place, key in enumerate(missing) if key not in computing), len(missing)
            )
            if shared and 2 * shared * page >= len(request.tokens) - len(prefix) * page:
                continue  # another request computes most of its prompt in this step
            if not self._place_adapter(request):
                if self.steps - request.arrival > _MAX_OVERTAKEN_STEPS:
                    break  # let running requests finish, so that a slot gets free
                continue
            if self._has_budget and not self.preemption.has_room(request, prefix):
                preempted += self._make_room(request, prefix)
                prefix = pool.find(keys)
            if not self._has_budget or not self.preemption.has_room(request, prefix):
                break
            self._start(request, prefix, keys)
            computing.update(self.tables.uncomputed_prompt_keys(request))
            if preempted:
                break
        return preempted

    def _place_adapter(self, request: Request) -> bool:
        """Whether the request's adapter, if any, is in a slot now."""
        if request.adapter is None or self.adapters is None:
            return True
        running = {other.adapter for other in self.running if other.adapter is not None}
        return self.adapters.place(request.adapter, running=running)

    def _start(self, request: Request, prefix: list[int], keys: list[bytes]) -> None:
        """Move a request to `running`, with its cached prefix and swapped blocks."""
        self.waiting.remove(request)
        self.running.append(request)
        request.admitted_s = request.admitted_s or time.perf_counter()
        self.pool.share(prefix)
        request.blocks, request.computed = prefix, len(prefix) * self.pool.block_size
        self.swapper.swap_in(request, keys[len(prefix) :])
        if not request.preemptions:
            request.cached_tokens = request.computed
        self._schedule_tokens(request, self._count(request))

    def _make_room(self, request: Request, prefix: list[int]) -> list[Request]:
        """Preempt requests of lower priority until there is room; none if that cannot help."""
        preempted: list[Request] = []
        keys = request.block_keys(len(prefix), self.pool.block_size)
        for victim in self.preemption.victims_for(request, prefix, self.in_flight_requests):
            if self.preemption.has_room(request, self.pool.find(keys)):
                break
            self._preempt(victim)
            preempted.append(victim)
        return preempted

    @property
    def _has_budget(self) -> bool:
        """Whether the step takes more: tokens, and requests up to its group's share."""
        sequences = min(len(self.running) + len(self.waiting), self.limits.sequences)
        share = -(-sequences // self.groups)
        return self._budget > 0 and (self.groups == 1 or len(self._scheduled) < share)

    def _count(self, request: Request) -> int:
        """Tokens of a request that the rest of the step takes."""
        count = min(request.pending, self._budget)
        return min(count, self._scored_budget) if request.scores_prompt else count

    def _schedule_tokens(self, request: Request, count: int) -> None:
        copy = self.tables.allocate(request, count)
        num_logits, scored = int(count == request.pending), request.scores_prompt
        self._scheduled[request] = ScheduledTokens(
            request, request.computed, count, copy, num_logits, scored
        )
        self._budget -= count
        self._scored_budget -= count if scored else 0

    def _add_drafts(self) -> None:
        """Add drafted tokens, only from the budget and blocks that are left over."""
        pool, page = self.pool, self.pool.block_size
        for request, part in self._scheduled.items():
            if not (request.max_drafts and part.samples and request.is_decoding):
                continue
            end = part.start + part.count
            in_blocks = len(request.blocks) * page - end
            more = min(pool.blocks_for(max(0, request.max_drafts - in_blocks)), pool.free)
            drafts = min(request.max_drafts, self._budget, in_blocks + more * page)
            self.tables.grow(request, end + drafts)
            self._scheduled[request] = replace(
                part, count=part.count + drafts, num_logits=1 + drafts
            )
            self._budget -= drafts

    def _preempt(self, victim: Request) -> None:
        part = self._scheduled.pop(victim, None)
        if part is not None:
            self._budget += part.count
            self._scored_budget += part.count if part.scored else 0
        self.preemption.preempt(victim)

    def _check_fits(self, request: Request) -> None:
        sampling, pool, limits = request.sampling, self.pool, self.limits
        needed = pool.blocks_for(len(request.prompt) + sampling.max_new_tokens)
        if needed > pool.blocks:
            raise ValueError(
                f"a prompt of {len(request.prompt)} and {sampling.max_new_tokens} new tokens needs "
                f"{needed} blocks, the cache has {pool.blocks}; request fewer"
            )
        if sampling.num_sequences > limits.sequences:
            name = "n" if sampling.n == sampling.num_sequences else "beams"
            raise ValueError(
                f"{name} is {sampling.num_sequences}; at most {limits.sequences} sequences run at "
                "a time"
            )
        blocks = sampling.beams * needed
        if sampling.beams > 1 and blocks > (1 - limits.watermark) * pool.blocks:
            raise ValueError(
                f"{sampling.beams} beams need {blocks} blocks at a time, the cache has "
                f"{pool.blocks}; request fewer beams or tokens"
            )

    def _flow_is_waiting(self, request: Request) -> bool:
        return any(
            other.client == request.client and other.priority == request.priority
            for other in self.waiting
        )


def _slot_order(part: ScheduledTokens) -> int:
    """Requests of one adapter next to each other, those without one last."""
    adapter = part.request.adapter
    return sys.maxsize if adapter is None or adapter.slot is None else adapter.slot
