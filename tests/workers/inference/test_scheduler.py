"""Block pool and scheduler without a model, under any order of requests, forks and aborts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.inference.kv_cache.block_pool import BlockPool, NoFreeBlock, hash_block
from workers.inference.kv_cache.cpu_swap import CpuBlocks, SwapCosts
from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.scheduling.scheduler import Scheduler
from workers.inference.scheduling.step_plan import StepPlan


class FakeModel:
    """A model that records the tokens written to each slot, and checks what would be read."""

    def __init__(
        self,
        blocks: int,
        page: int,
        limits: Limits,
        *,
        window: int | None = None,
        swap: int = 0,
        drafts: bool = False,
        reads: bool = False,
    ) -> None:
        self.pool = BlockPool(blocks, page)
        self.scheduler = Scheduler(
            self.pool, limits, window=window, swap=CpuBlocks(swap) if swap else None
        )
        self.scheduler.swapper.costs = SwapCosts(block_s=1e-3, token_s=1.0)
        self.scheduler.tables.draft_reads_cache = reads
        self.cpu_cells: dict[int, list[tuple[int, ...] | None]] = {}
        self.window, self.drafts = window or 10**6, drafts
        self.cells: dict[int, list[tuple[int, ...] | None]] = {
            block: [None] * page for block in range(blocks)
        }
        self.limits, self.page = limits, page

    def step(self, rng: random.Random) -> StepPlan:
        ran = set(self.scheduler.running)
        for each in ran:
            each.max_drafts = (
                rng.randint(0, each.sampling.max_new_tokens - len(each.output_tokens) - 1)
                if self.drafts
                else 0
            )
            each.draft = [rng.randrange(3) for _ in range(each.max_drafts)]
        plan = self.scheduler.schedule()
        self.check_plan(plan, ran)
        for block, place in plan.swap_outs:
            self.cpu_cells[place] = list(self.cells[block])
        for place, block in plan.swap_ins:
            self.cells[block] = list(self.cpu_cells[place])
        for each in plan.scheduled:
            if each.copy:
                source, target = each.copy
                self.cells[target] = list(self.cells[source])
        for each in plan.scheduled:
            request = each.request
            for place in range(each.start, each.start + each.count):
                # a key depends on all tokens before it, so a cell holds the prefix
                prefix = (*request.tokens, *request.draft)[: place + 1]
                self.cells[request.blocks[place // self.page]][place % self.page] = prefix
            for place in range(max(0, each.start + 1 - self.window), each.start + each.count):
                cell = self.cells[request.blocks[place // self.page]][place % self.page]
                assert cell == (*request.tokens, *request.draft)[: place + 1]
        self.scheduler.finish_step(plan)
        for each in plan.scheduled:
            if self.scheduler.tables.draft_reads_cache:
                # at times a draft model computes what the model has computed
                request = each.request
                for place in range(
                    max(0, request.draft_computed + 1 - self.window), request.computed
                ):
                    assert place >= request.freed_blocks * self.page, (
                        "blocks that a draft model still reads are freed"
                    )
                request.draft_computed = rng.choice([request.draft_computed, request.computed])
            if each.samples:
                self.answer(each.request, rng, rng.randint(0, each.num_drafts))
        self.check_pool()
        return plan

    def answer(self, request: Request, rng: random.Random, accepted: int) -> None:
        children = []
        if len(request.tokens) == len(request.prompt):
            children = [
                Request(request.prompt, request.sampling, n) for n in range(1, request.sampling.n)
            ]
            self.scheduler.fork(request, children)
        for each in (request, *children):
            each.tokens += each.draft[:accepted]
            stops = bool(accepted) and rng.random() < 0.1  # within accepted drafts
            if not stops:
                each.tokens.append(rng.randrange(3))
            self.scheduler.accept(each, accepted)
            if stops or len(each.output_tokens) == each.sampling.max_new_tokens:
                each.finish = "length"
                self.scheduler.remove(each)

    def check_plan(self, plan: StepPlan, ran: set[Request]) -> None:
        assert plan.tokens <= self.limits.step_tokens
        assert len({each.request for each in plan.scheduled}) == len(plan.scheduled)
        assert len(self.scheduler.running) <= self.limits.sequences
        is_decoding = [each.request.is_decoding for each in plan.scheduled if each.request in ran]
        assert is_decoding == sorted(is_decoding, reverse=True), "decodes come first"
        for each in plan.scheduled:
            first, last = each.start // self.page, (each.start + each.count - 1) // self.page
            for block in each.request.blocks[first : last + 1]:
                assert self.pool.references(block) == 1, "writes to a shared block"
                assert not self.pool.is_sealed(block), "writes to a sealed block"

    def check_pool(self) -> None:
        references = Counter(
            block for each in self.scheduler.running for block in each.blocks[each.freed_blocks :]
        )
        assert all(
            self.pool.references(block) == references[block] for block in range(self.pool.blocks)
        )
        assert self.pool.used == len(references), "a block leaked"
        assert not any(each.blocks for each in self.scheduler.waiting)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(14, 24),
    page=st.integers(1, 4),
    step_tokens=st.integers(1, 20),
    sequences=st.integers(3, 6),
    requests=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=12
    ),
    window=st.none() | st.integers(1, 7),
    swap=st.integers(0, 9),
    priorities=st.integers(0, 2),
    drafts=st.booleans(),
    reads=st.booleans(),
)
def test_no_block_leaks_and_no_shared_block_is_written(
    seed, blocks, page, step_tokens, sequences, requests, window, swap, priorities, drafts, reads
):
    """Few different tokens, so prefixes are often shared; little memory, so many are preempted."""
    rng = random.Random(seed)
    limits = Limits(step_tokens, sequences, watermark=rng.choice([0, 0.1]))
    model = FakeModel(blocks, page, limits, window=window, swap=swap, drafts=drafts, reads=reads)
    todo = [
        Request(
            tuple(rng.randrange(2) for _ in range(length)),
            SamplingParams(max_new_tokens=new, n=n),
            priority=rng.randint(0, priorities),
            client=rng.choice("abc"),
        )
        for length, new, n in requests
    ]
    added: list[Request] = []
    for _ in range(2000):
        if todo and rng.random() < 0.5:
            added.append(todo.pop())
            model.scheduler.add(added[-1])
        alive = [*model.scheduler.running, *model.scheduler.waiting]
        if alive and rng.random() < 0.05:
            aborted = rng.choice(alive)
            model.scheduler.remove(aborted)
            aborted.finish = "aborted"
        busy = bool(model.scheduler.running or model.scheduler.waiting)
        assert model.step(rng).scheduled or not busy, "every step computes something"
        if not (todo or model.scheduler.running or model.scheduler.waiting):
            break
    assert all(each.finish for each in added), "every request finishes"
    assert model.pool.free == blocks


def test_long_prompt_is_chunked_next_to_decodes():
    model, rng = FakeModel(64, 4, Limits(step_tokens=8, sequences=4)), random.Random(1)
    short, long = (Request(tuple(range(n)), SamplingParams(max_new_tokens=10)) for n in (3, 30))
    model.scheduler.add(short)
    model.step(rng)
    model.scheduler.add(long)
    counts = [
        [(each.request is short, each.count) for each in model.step(rng).scheduled]
        for _ in range(5)
    ]
    assert counts == [[(True, 1), (False, 7)]] * 4 + [[(True, 1), (False, 2)]]


def test_prefix_is_computed_once_and_lru_blocks_are_evicted():
    model, rng = FakeModel(8, 4, Limits(step_tokens=64, sequences=4, watermark=0)), random.Random(1)
    prompt = tuple(range(13))
    for cached in (0, 12):
        model.scheduler.add(request := Request(prompt, SamplingParams(max_new_tokens=1)))
        model.step(rng)
        assert request.cached_tokens == cached
    # needs more than the empty blocks
    model.scheduler.add(Request(tuple(range(50, 74)), SamplingParams(max_new_tokens=1)))
    model.step(rng)
    model.scheduler.add(request := Request(prompt, SamplingParams(max_new_tokens=1)))
    model.step(rng)
    assert request.cached_tokens == 8, "the last block of a prefix is evicted first"


def test_common_prefix_of_simultaneous_requests_is_computed_once():
    model, rng = FakeModel(64, 4, Limits(step_tokens=16, sequences=8)), random.Random(1)
    prompt = tuple(range(33))
    requests = [
        Request((*prompt, 40 + each), SamplingParams(max_new_tokens=2)) for each in range(4)
    ]
    for each in requests:
        model.scheduler.add(each)
    computed = 0
    while model.scheduler.running or model.scheduler.waiting:
        computed += sum(
            each.count
            for each in model.step(rng).scheduled
            if each.count > 1 or not each.request.is_decoding
        )
    assert computed <= 34 + 3 * 2 + 4 and [each.cached_tokens for each in requests] == [
        0,
        32,
        32,
        32,
    ]


def test_blocks_are_swapped_if_that_is_cheaper():
    computed = {}
    for block_s in (1e-3, 100.0):
        model, rng = FakeModel(12, 4, Limits(sequences=3, watermark=0), swap=16), random.Random(1)
        model.scheduler.swapper.costs = SwapCosts(block_s, token_s=1.0)
        for each in range(3):
            model.scheduler.add(Request((each,) * 13, SamplingParams(max_new_tokens=14)))
        counts = []
        while model.scheduler.running or model.scheduler.waiting:
            counts.append(model.step(rng).tokens)
        computed[block_s] = sum(counts)
        assert (model.scheduler.swapper.total > 0) == (
            block_s < 1
        ) and model.scheduler.preemption.count > 0
    assert computed[1e-3] < computed[100.0]
    costs = SwapCosts(block_s=0.1)
    assert not costs.prefers_swap(16), "prefill time is not measured yet"
    costs.record_prefill(10, 1.0)
    assert costs.prefers_swap(16) and not costs.prefers_swap(1)


def test_priority_preempts_lower_and_starves_none(monkeypatch):
    model, rng = FakeModel(8, 4, Limits(step_tokens=64, sequences=4, watermark=0)), random.Random(1)
    low = [Request((each,) * 9, SamplingParams(max_new_tokens=5)) for each in range(2)]
    high = Request((7,) * 17, SamplingParams(max_new_tokens=3), priority=1)
    for each in low:
        model.scheduler.add(each)
    model.step(rng)
    model.scheduler.add(high)
    plan = model.step(rng)
    assert high in [each.request for each in plan.scheduled] and plan.preempted == (low[1],)
    while not low[1].finish:
        assert model.step(rng).scheduled
    assert high.finish
    monkeypatch.setattr("workers.inference.scheduling.policy.AGING_STEPS", 20)
    model = FakeModel(8, 4, Limits(step_tokens=64, sequences=1, watermark=0))
    model.scheduler.add(patient := Request((1,) * 9, SamplingParams(max_new_tokens=5)))
    for number in range(60):
        model.scheduler.add(Request((number,) * 9, SamplingParams(max_new_tokens=2), priority=1))
        model.step(rng)
    assert patient.finish, "requests that arrive 20 steps later no longer precede it"


def test_clients_share_a_full_engine_evenly():
    model, rng = FakeModel(64, 4, Limits(step_tokens=64, sequences=2)), random.Random(1)

    def add(client: str, count: int, priority: int = 0) -> list[Request]:
        requests = [
            Request((1, 2, 3), SamplingParams(max_new_tokens=6), client=client, priority=priority)
            for _ in range(count)
        ]
        for each in requests:
            model.scheduler.add(each)
        return requests

    def first(requests: list[Request], count: int) -> list[Request]:
        finished: list[Request] = []
        while len(finished) < count:
            model.step(rng)
            finished += [each for each in requests if each.finish and each not in finished]
        return finished

    flood = add("a", 40)
    first(flood, 8)
    (late,) = add("b", 1)
    before = sum(bool(each.finish) for each in flood)
    first([late], 1)
    assert sum(bool(each.finish) for each in flood) - before <= 4, (
        "it waits for running requests, not for the queue"
    )
    first(flood, 40)
    both = add("a", 40) + add("b", 40)
    shares = Counter(each.client for each in first(both, 40))
    assert abs(shares["a"] - shares["b"]) <= 6, "each of two flooding clients gets half"
    (urgent,) = add("a", 1, priority=1)
    first([urgent], 1)
    assert sum(bool(each.finish) for each in both) <= 46, (
        "priority precedes the client's other requests"
    )


def test_blocks_outside_the_window_are_freed():
    model, rng = (
        FakeModel(8, 4, Limits(step_tokens=64, sequences=4, watermark=0), window=6),
        random.Random(1),
    )
    model.scheduler.add(request := Request((1,) * 9, SamplingParams(max_new_tokens=20)))
    used = []
    while not request.finish:
        model.step(rng)
        used.append(model.pool.used)
    assert max(used) <= 3 and max(used[4:-1]) <= 3


def test_request_that_cannot_run_alone_is_refused():
    scheduler = Scheduler(BlockPool(2, 4), Limits(sequences=2))
    with pytest.raises(ValueError, match="needs 3 blocks, the cache has 2"):
        scheduler.add(Request((1,) * 5, SamplingParams(max_new_tokens=4)))
    with pytest.raises(ValueError, match="n is 3"):
        scheduler.add(Request((1,), SamplingParams(max_new_tokens=1, n=3)))
    pool = BlockPool(1, 4)
    pool.take()
    with pytest.raises(NoFreeBlock):
        pool.take()
    assert (
        hash_block(b"", [1, 2])
        != hash_block(b"", [2, 1])
        != hash_block(hash_block(b"", [1]), [2, 1])
    )
