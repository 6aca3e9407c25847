"""One simulated engine: continuous batching as the engine's scheduler does it.

Follows `workers/inference/scheduling`: decodes first, then prompts in chunks, admission in order of
arrival while slots and blocks suffice, and preemption of the last in order when blocks run out. A
test runs both on the same requests and compares each step.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from dataclasses import dataclass, field

from orchestrator.planner.serving.simulation.decode_group import DecodeGroup
from orchestrator.planner.serving.simulation.free_blocks import FreeBlocks
from orchestrator.planner.serving.simulation.step_times import StepTimes, StepWork

_NEVER = math.inf
_MAX_MERGED_STEPS = 64


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine: cache blocks, tokens per step, sequences, and blocks kept free."""

    blocks: int
    block_size: int = 16
    step_tokens: int = 2048
    sequences: int = 256
    watermark: float = 0.01

    def blocks_for(self, tokens: int) -> int:
        """Blocks that this many tokens fill."""
        return -(-tokens // self.block_size)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request: `prompt` and `output` tokens, and its times in seconds.

    `computed` of its tokens are in the cache, in `held` blocks of its own and `shared` blocks of a
    common prefix. `received` tokens of the prompt came from another engine.
    """

    number: int
    arrival: float
    prompt: int
    output: int
    received: int = 0
    computed: int = 0
    produced: int = 0
    held: int = 0
    shared: int = 0
    preemptions: int = 0
    admitted_s: float = _NEVER
    first_token_s: float = _NEVER
    end_s: float = _NEVER

    @property
    def tokens(self) -> int:
        """Prompt and produced tokens."""
        return self.prompt + self.produced

    @property
    def pending(self) -> int:
        """Tokens to compute before its next token."""
        return self.tokens - self.computed

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token has to be computed."""
        return self.produced > 0 and self.pending == 1


@dataclass(slots=True)
class Totals:
    """Sums over steps: `running_s`, `waiting_s` and `blocks_s` are counts times seconds.

    `prefill_s` are the seconds of steps with tokens of prompts.
    """

    steps: int = 0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0
    blocks_s: float = 0.0
    max_running: int = 0
    max_waiting: int = 0
    max_blocks: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(slots=True)
class Replica:
    """An engine at `now`; `add` requests in order of arrival, then `advance`."""

    limits: EngineLimits
    times: StepTimes
    shared_prefix: int = 0
    now: float = 0.0
    running: list[SimulatedRequest] = field(default_factory=list)
    waiting: list[SimulatedRequest] = field(default_factory=list)
    finished: list[SimulatedRequest] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    prompts: list[SimulatedRequest] = field(default_factory=list)  # running ones, not decoding
    free: int = 0
    cache: FreeBlocks = field(init=False)
    group: DecodeGroup[SimulatedRequest] = field(init=False)  # all other running ones
    prefix_computed: bool = False

    def __post_init__(self) -> None:
        self.free = self.limits.blocks
        self.cache = FreeBlocks(self.limits.blocks)
        self.group = DecodeGroup(self.limits.block_size)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.waiting)

    @property
    def unfinished(self) -> int:
        """Requests in the engine."""
        return len(self.running) + len(self.waiting)

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request; it is not scheduled before its arrival."""
        insort(self.waiting, request, key=_order)

    def advance(self, until: float) -> None:
        """Compute steps until one ends at or after `until`, or nothing is left."""
        while self.busy and self.now < until:
            self.step(until)

    def step(self, until: float = _NEVER) -> StepWork:
        """Compute one step, or several equal decode steps that end by `until`; their work.

        The work of several steps is that of the middle one.
        """
        if not self.running:  # idle until the next request arrives
            self.now = max(self.now, self.waiting[0].arrival)
        if self.waiting and self.waiting[-1].arrival > self.now:
            until = min(until, self.waiting[bisect(self.waiting, self.now, key=_arrival)].arrival)
        if not self._blocks_suffice():
            return self._step_with_preemption()
        group = self.group
        prompts: list[tuple[SimulatedRequest, int]] = []
        budget = self.limits.step_tokens - len(group)
        self._take_blocks(group.blocks_needed(1))
        for request in sorted(self.prompts, key=_order):
            if count := min(request.pending, budget):
                self._take(request, count)
                prompts.append((request, count))
                budget -= count
        prompts += self._admit(budget)
        assert prompts or group, "a request fits in no cache"
        work = self._work_of(prompts)
        seconds, count = self.times.seconds(work), 1
        if not prompts and not self.prompts:
            count = self._mergeable(seconds, until)
            self._take_blocks(group.blocks_needed(count) - group.blocks_needed(1))
            work.decode_context += len(group) * (count - 1) / 2
            work.cached_tokens += len(group) * (count - 1) / 2
            seconds = count * self.times.seconds(work)
        self._record(seconds, count, prefill=bool(prompts))
        self.now += seconds
        for request in group.advance(count):
            self._end(request)
        self._finish(prompts)
        return work

    def _blocks_suffice(self) -> bool:
        """Whether all running requests can compute their part of a step without preemption."""
        budget = self.limits.step_tokens - len(self.group)
        needed = self.group.blocks_needed(1)
        for request in sorted(self.prompts, key=_order):
            if count := min(request.pending, max(0, budget)):
                needed += max(0, self._missing(request, count))
                budget -= count
        return budget >= 0 and needed <= self.free

    def _mergeable(self, seconds: float, until: float) -> int:
        """How many steps repeat this one: none finishes or is preempted, none arrives."""
        count = min(_MAX_MERGED_STEPS, self.group.steps_to_end())
        if until < _NEVER and seconds > 0:
            count = min(count, math.ceil((until - self.now) / seconds))
        first = self.group.blocks_needed(1)
        while count > 1 and self.group.blocks_needed(count) - first > self.free:
            count //= 2
        return max(1, count)

    def _step_with_preemption(self) -> StepWork:
        """One step in which blocks or tokens run out, request by request."""
        self.group.leave_all()
        scheduled = self._schedule()
        work = StepWork()
        for request, count in scheduled:
            self._add_work(work, request, count)
        seconds = self.times.seconds(work)
        self._record(seconds, 1, prefill=work.prefill_tokens > 0)
        self.now += seconds
        self.prompts = [*self.running]
        self._finish(scheduled)
        for request in [one for one in self.prompts if one.is_decoding]:  # those without tokens
            self._start_decoding(request)
        return work

    def _schedule(self) -> list[tuple[SimulatedRequest, int]]:
        """Tokens per running request in the next step, after preemptions."""
        scheduled: dict[int, tuple[SimulatedRequest, int]] = {}
        budget, preempted = self.limits.step_tokens, False
        for request in sorted(self.running, key=lambda one: (not one.is_decoding, _order(one))):
            if budget <= 0 or request not in self.running:
                continue
            count = min(request.pending, budget)
            while self._missing(request, count) > self.free:
                victim = max(self.running, key=_order)
                budget += scheduled.pop(victim.number, (victim, 0))[1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                self._take(request, count)
                scheduled[request.number] = (request, count)
                budget -= count
        self.prompts = [one for one in self.running if not one.is_decoding]
        admitted = [] if preempted else self._admit(budget)
        return [*scheduled.values(), *admitted]

    def _admit(self, budget: int) -> list[tuple[SimulatedRequest, int]]:
        """Start waiting requests in order while there is room; their tokens in this step."""
        admitted = []
        for request in self.waiting[:]:
            if budget <= 0 or request.arrival > self.now:
                break
            if self._waits_for_prefix(request):
                continue
            if not self._has_room(request):
                break
            self.waiting.remove(request)
            self.running.append(request)
            self.prompts.append(request)
            request.admitted_s = min(request.admitted_s, self.now)
            self._reuse_blocks(request)
            count = min(request.pending, budget)
            self._take(request, count)
            admitted.append((request, count))
            budget -= count
        return admitted

    def _waits_for_prefix(self, request: SimulatedRequest) -> bool:
        """Whether a running request computes most of its prompt at present."""
        page = self.limits.block_size
        common = self._common_tokens(request) // page
        computing = bool(self.running) and not self.prefix_computed
        return computing and common > 0 and 2 * common * page >= request.tokens

    def _cached_prefix(self, request: SimulatedRequest) -> int:
        """Blocks of the common prefix that the cache has."""
        if not self.prefix_computed:
            return 0
        return self._common_tokens(request) // self.limits.block_size

    def _common_tokens(self, request: SimulatedRequest) -> int:
        """Tokens of the common prefix in its prompt; its last token is always computed."""
        return min(self.shared_prefix, request.prompt, request.tokens - 1)

    def _reuse_blocks(self, request: SimulatedRequest) -> None:
        """Start after the common prefix, or after its own blocks that no other has taken."""
        page = self.limits.block_size
        request.shared = self._cached_prefix(request)
        if request.preemptions:
            most = max(0, (request.tokens - 1) // page - request.shared)
            request.held = self.cache.reuse(request.number, most)
            self.free -= request.held
        request.computed = max(page * (request.shared + request.held), request.received)
        if request.preemptions:
            self.totals.recomputed_tokens += request.tokens - request.computed

    def _has_room(self, request: SimulatedRequest) -> bool:
        limits = self.limits
        spare = int(limits.watermark * limits.blocks) if self.running else 0
        reserved = sum(
            max(0, limits.blocks_for(one.tokens) - one.shared - one.held) for one in self.prompts
        )
        new = limits.blocks_for(request.tokens) - self._cached_prefix(request)
        return len(self.running) < limits.sequences and self.free - reserved - new >= spare

    def _missing(self, request: SimulatedRequest, count: int) -> int:
        blocks = self.limits.blocks_for(request.computed + count)
        return blocks - request.shared - request.held

    def _take(self, request: SimulatedRequest, count: int) -> None:
        missing = max(0, self._missing(request, count))
        request.held += missing
        self._take_blocks(missing)

    def _take_blocks(self, count: int) -> None:
        self.free -= count
        self.cache.take(count)

    def _release(self, request: SimulatedRequest) -> None:
        full = min(request.held, request.computed // self.limits.block_size - request.shared)
        self.cache.release(request.number, max(0, full), request.held)
        self.free += request.held
        request.held = request.shared = 0

    def _preempt(self, victim: SimulatedRequest) -> None:
        self.running.remove(victim)
        self._release(victim)
        self.totals.preemptions += 1
        victim.preemptions += 1
        victim.computed = victim.received = 0
        insort(self.waiting, victim, key=_order)

    def _record(self, seconds: float, count: int, *, prefill: bool) -> None:
        totals, running, waiting = self.totals, len(self.running), len(self.waiting)
        used = self.limits.blocks - self.free
        totals.steps += count
        totals.busy_s += seconds
        totals.prefill_s += seconds if prefill else 0.0
        totals.running_s += seconds * running
        totals.waiting_s += seconds * waiting
        totals.blocks_s += seconds * used
        totals.max_running = max(totals.max_running, running)
        totals.max_waiting = max(totals.max_waiting, waiting)
        totals.max_blocks = max(totals.max_blocks, used)

    def _finish(self, scheduled: list[tuple[SimulatedRequest, int]]) -> None:
        """Append the next token of those whose tokens are computed; they decode, or end."""
        for request, count in scheduled:
            request.computed += count
            if request.computed < request.tokens:
                continue
            request.produced += 1
            request.first_token_s = min(request.first_token_s, self.now)
            if not self.prefix_computed and self.shared_prefix:
                self._share_prefix(request)
            if request.produced >= request.output:
                self.prompts.remove(request)
                self._end(request)
            else:
                self._start_decoding(request)

    def _start_decoding(self, request: SimulatedRequest) -> None:
        self.prompts.remove(request)
        self.group.join(request)

    def _end(self, request: SimulatedRequest) -> None:
        request.end_s = self.now
        self.running.remove(request)
        self._release(request)
        self.finished.append(request)

    def _share_prefix(self, request: SimulatedRequest) -> None:
        """Its first blocks stay in the cache for all later requests."""
        blocks = min(self.shared_prefix, request.prompt) // self.limits.block_size
        self.prefix_computed = True
        request.held -= blocks
        request.shared = blocks

    def _work_of(self, prompts: list[tuple[SimulatedRequest, int]]) -> StepWork:
        """The work of a step with all decoding requests and these tokens of prompts."""
        size, context = len(self.group), self.group.context
        work = StepWork(0, size, size, float(context + size), 0.0, float(context + size))
        for request, count in prompts:
            self._add_work(work, request, count)
        return work

    def _add_work(self, work: StepWork, request: SimulatedRequest, count: int) -> None:
        if request.is_decoding:
            work.add_decode(request.computed + 1)
        else:
            completes = request.computed + count == request.tokens
            work.add_prefill(request.computed, count, completes=completes)


def _order(request: SimulatedRequest) -> tuple[float, int]:
    """First come, first served."""
    return request.arrival, request.number


def _arrival(request: SimulatedRequest) -> float:
    return request.arrival
