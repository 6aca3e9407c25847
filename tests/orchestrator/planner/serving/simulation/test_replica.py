"""The simulated engine against the engine's own scheduler, step by step, and its accounting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.serving.simulation.replica import (
    EngineLimits,
    Replica,
    SimulatedRequest,
)
from orchestrator.planner.serving.simulation.step_times import MeasuredStepTimes, StepWork
from workers.contracts.wire.serving_reports import StepCosts
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.scheduling.scheduler import Scheduler

ONE_SECOND = MeasuredStepTimes(StepCosts(step_s=1.0))


class EveryStep:
    """Each step takes a second, so that arrivals are counted in steps."""

    def __init__(self) -> None:
        self.works: list[StepWork] = []

    def seconds(self, work: StepWork) -> float:
        return 1.0


def scheduler_steps(
    arrivals: list[tuple[int, int, int]], limits: EngineLimits
) -> list[tuple[int, int, int]]:
    """`(prompt tokens, decodes, preemptions)` of each step of the engine's scheduler."""
    scheduler = Scheduler(
        BlockPool(limits.blocks, limits.block_size),
        Limits(limits.step_tokens, limits.sequences, limits.watermark),
    )
    todo, steps, now = list(arrivals), [], 0
    live: list[Request] = []
    while todo or live:
        while todo and todo[0][0] <= now:
            _, prompt, output = todo.pop(0)
            # distinct tokens: nothing is found in the cache of another request
            tokens = tuple(1000 * len(steps) + 7919 * len(todo) + index for index in range(prompt))
            sampling = SamplingParams(max_new_tokens=output, ignore_eos=True)
            # each from another client: one client's requests may overtake its preempted one
            request = Request(tokens, sampling, client=str(len(todo)))
            scheduler.add(request)
            live.append(request)
        now += 1
        if not live:
            continue
        plan = scheduler.schedule()
        decodes = sum(part.request.is_decoding for part in plan.scheduled)
        prefill = sum(part.count for part in plan.scheduled if not part.request.is_decoding)
        scheduler.finish_step(plan)
        for part in plan.scheduled:
            request = part.request
            if part.samples:
                request.tokens.append(random.randrange(10**9))
                scheduler.accept(request, 0)
                if len(request.output_tokens) == request.sampling.max_new_tokens:
                    request.finish = "length"
                    scheduler.remove(request)
                    live.remove(request)
        steps.append((prefill, decodes, len(plan.preempted)))
    return steps


def simulated_steps(
    arrivals: list[tuple[int, int, int]], limits: EngineLimits
) -> list[tuple[int, int, int]]:
    replica = Replica(limits, EveryStep())
    for number, each in enumerate(arrivals):
        replica.add(SimulatedRequest(number, *each))
    steps = []
    while replica.busy:
        before = replica.totals.preemptions
        work = replica.step(replica.now + 1)
        steps.append((work.prefill_tokens, work.decodes, replica.totals.preemptions - before))
    return steps


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 40)),
        min_size=1,
        max_size=14,
    ),
    st.integers(7, 40),
    st.integers(8, 100),
    st.integers(1, 8),
)
def test_each_step_equals_the_schedulers(
    given_arrivals: list[tuple[int, int, int]], blocks: int, tokens: int, sequences: int
) -> None:
    limits = EngineLimits(blocks, 16, tokens, sequences, 0.01)
    arrivals = [each for each in sorted(given_arrivals) if each[1] + each[2] <= 16 * blocks]
    assert simulated_steps(arrivals, limits) == scheduler_steps(arrivals, limits)


def test_merged_decode_steps_equal_single_ones() -> None:
    costs = StepCosts(step_s=0.01, decode_s=0.001, decode_context_s=1e-5, prefill_token_s=1e-4)
    limits = EngineLimits(1000)
    ends = []
    for until in (float("inf"), None):
        replica = Replica(limits, MeasuredStepTimes(costs))
        requests = [SimulatedRequest(number, 0.0, 50 + number, 40 + number) for number in range(9)]
        for request in requests:
            replica.add(request)
        while replica.busy:
            replica.step(replica.now if until is None else until)  # None: one step at a time
        ends.append([request.end_s for request in requests])
        assert replica.free == limits.blocks
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_a_common_prefix_is_computed_once_and_stays_cached() -> None:
    replica = Replica(EngineLimits(100), ONE_SECOND, shared_prefix=64)
    works = []
    for number in range(3):
        replica.add(SimulatedRequest(number, 0.0, 80, 4))
    while replica.busy:
        works.append(replica.step(replica.now))
    # the others wait until the first has computed the 4 common blocks, then compute 16 tokens each
    assert [work.prefill_tokens for work in works[:2]] == [80, 32]
    assert replica.free == 100 - 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 40)),
        min_size=1,
        max_size=14,
    ),
    st.integers(0, 50),
    st.integers(11, 30),
)
def test_requests_with_a_common_prefix_finish_and_free_their_blocks(
    arrivals: list[tuple[int, int, int]], prefix: int, blocks: int
) -> None:
    """Few blocks: requests are preempted, with blocks of their own and of the prefix."""
    replica = Replica(EngineLimits(blocks, 16, 50, 8), EveryStep(), shared_prefix=prefix)
    for number, each in enumerate(sorted(arrivals)):
        replica.add(SimulatedRequest(number, *each))
    while replica.busy:
        work = replica.step(replica.now + 1)
        assert work.prefill_tokens >= 0 and replica.free >= 0
        for request in replica.prompts:
            assert 0 <= request.computed < request.tokens
    assert len(replica.finished) == len(arrivals)
    pinned = blocks - replica.free
    assert 0 <= pinned <= prefix // 16


def test_a_request_does_not_start_before_it_arrives() -> None:
    replica = Replica(EngineLimits(100), ONE_SECOND)
    early, late = SimulatedRequest(0, 0.0, 10, 2), SimulatedRequest(1, 50.0, 10, 2)
    replica.add(early)
    replica.add(late)
    replica.advance(float("inf"))
    assert (early.end_s, late.first_token_s) == (2.0, 51.0)
