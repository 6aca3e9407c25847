"""Preemption: whether a request fits next to the running ones, and which of them give way.

A preempted request frees its blocks and waits again. Its full blocks are swapped to CPU memory if
that costs less than recomputing them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection

from workers.inference.kv_cache.cpu_swap import CpuBlocks, Swapper
from workers.inference.request import Request
from workers.inference.scheduling.block_tables import BlockTables
from workers.inference.scheduling.policy import Limits, order_key, sequence_slots


class Preemption:
    """Moves requests from `running` to `waiting`, which the scheduler owns."""

    def __init__(
        self,
        tables: BlockTables,
        limits: Limits,
        running: list[Request],
        waiting: deque[Request],
        cpu_blocks: CpuBlocks | None,
    ) -> None:
        self.tables, self.limits = tables, limits
        self.running, self.waiting = running, waiting
        self.swapper = Swapper(tables.pool, cpu_blocks)
        self.count = 0

    def has_room(self, request: Request, prefix: list[int]) -> bool:
        """Whether slots and blocks suffice for a request with these cached `prefix` blocks.

        Counts what running prompts in chunks still need.
        """
        pool = self.tables.pool
        spare = int(self.limits.watermark * pool.blocks) if self.running else 0
        reserved = sum(self.tables.missing_for_prompt(other) for other in self.running)
        slots = self.limits.sequences - sum(sequence_slots(other) for other in self.running)
        new = pool.blocks_for(len(request.tokens)) - len(prefix)
        free = pool.free - pool.count_free(prefix)
        return sequence_slots(request) <= slots and free - reserved - new >= spare

    def victims_for(
        self, request: Request, prefix: list[int], in_flight: Collection[Request]
    ) -> list[Request]:
        """Running requests of lower priority that come after it, the last first.

        None if even preempting all of them would not make room.
        """
        pool = self.tables.pool
        victims = [
            other
            for other in self.running
            if other.priority < request.priority
            and order_key(other) > order_key(request)
            and other not in in_flight
        ]
        victims.sort(key=order_key, reverse=True)
        others = [other for other in self.running if other not in victims]
        used = {block for other in others for block in other.blocks[other.freed_blocks :]}
        slots = self.limits.sequences - sum(sequence_slots(other) for other in others)
        reserved = sum(self.tables.missing_for_prompt(other) for other in others)
        new = pool.blocks_for(len(request.tokens)) - len(prefix)
        free = pool.blocks - len(used | set(prefix)) - reserved
        return victims if sequence_slots(request) <= slots and free >= new else []

    def last(self) -> Request:
        """The running request that comes last in order."""
        return max(self.running, key=order_key)

    def preempt(self, victim: Request) -> None:
        """Swap out or drop its blocks, and put it back into the queue."""
        self.swapper.swap_out(victim)
        self.requeue(victim)
        victim.preemptions += 1
        self.count += 1

    def requeue(self, request: Request) -> None:
        """Drop its blocks, and put it back into the queue."""
        self.running.remove(request)
        self.tables.release(request)
        insort(self.waiting, request, key=order_key)
