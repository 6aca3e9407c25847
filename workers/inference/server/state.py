"""What an engine and its requests look like from outside: EngineState, RequestTold and Summary from live objects.

Reads; changes nothing. Called in the engine's thread, between two steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from workers.contracts.serving import EngineState, RequestTold, Summary
from workers.inference.blocks import BlockPool
from workers.inference.engine import Engine
from workers.inference.request import Request

_LISTED = 256  # requests of each kind in one state
_REMEMBERED = 100_000  # latencies that percentiles are of: the newest


def engine_state(
    engine: Engine, names: Mapping[int, str], ended: Sequence[Request], *, since_s: float, draining: bool
) -> EngineState:
    """`names` are tickets by the number of a request's parent; times count from `since_s`."""
    scheduler = engine.scheduler
    live = [*scheduler.running[:_LISTED], *list(scheduler.waiting)[:_LISTED]]
    return EngineState(
        now_s=time.perf_counter() - since_s,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        blocks=scheduler.pool.blocks,
        block_size=scheduler.pool.block_size,
        used=scheduler.pool.used,
        map=block_map(scheduler.pool),
        requests=[told(each, names.get(each.parent, ""), since_s=since_s) for each in (*live, *ended)],
        ended=len(ended),
        draining=draining,
    )


def merged(states: Sequence[EngineState]) -> EngineState:
    """Several replicas' as one, by the clock of the first."""
    first = states[0]
    requests = [_later(each, by_s=first.now_s - state.now_s) for state in states for each in state.requests]
    sums = {
        name: sum(getattr(each, name) for each in states) for name in ("running", "waiting", "blocks", "used", "ended")
    }
    return first.model_copy(update={**sums, "map": "".join(each.map for each in states), "requests": requests})


def _later(request: RequestTold, *, by_s: float) -> RequestTold:
    times = {name: getattr(request, name) for name in ("added_s", "admitted_s", "first_token_s", "ended_s")}
    moved = {name: max(0.0, at_s + by_s) for name, at_s in times.items() if at_s is not None}
    return request.model_copy(update=moved)


def block_map(pool: BlockPool) -> str:
    """A letter a block, as EngineState says."""
    letters = []
    for block in range(pool.blocks):
        held = pool.references(block)
        free = "k" if pool.is_sealed(block) else "."
        letters.append(free if held == 0 else "1" if held == 1 else "s")
    return "".join(letters)


def told(request: Request, name: str, *, since_s: float) -> RequestTold:
    """`name` is the ticket's; answers after the first have their number behind it."""
    new = len(request.tokens) - len(request.prompt)

    def at(clock_s: float) -> float | None:
        return max(0.0, clock_s - since_s) if clock_s else None

    if request.finish is not None:
        state = "ended"
    elif not request.blocks:
        state = "waiting"
    else:
        state = "decode" if new else "prefill"
    return RequestTold.model_validate(
        {
            "id": f"{name}/{request.answer}" if request.answer else name,
            "state": state,
            "added_s": at(request.added_s) or 0.0,
            "admitted_s": at(request.admitted_s),
            "first_token_s": at(request.first_token_s),
            "ended_s": at(request.ended_s),
            "prompt_tokens": len(request.prompt),
            "shared_tokens": request.shared_tokens,
            "new_tokens": new,
            "max_new_tokens": request.sampling.max_new_tokens,
            "blocks": len(request.blocks),
            "preemptions": request.preemptions,
            "priority": request.priority,
            "accepted": request.accepted,
            "drafted": request.drafted,
            "finish": request.finish,
        }
    )


class Ended:
    """All requests that ended so far, as far as a summary needs them."""

    def __init__(self) -> None:
        self._finishes: Counter[str] = Counter()
        self._prompt = self._shared = self._new = 0
        self._ttft_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._tpot_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: deque[RequestTold] = deque(maxlen=32)

    def add(self, request: RequestTold) -> None:
        self._finishes[request.finish or "aborted"] += 1
        self._prompt += request.prompt_tokens
        self._shared += request.shared_tokens
        self._new += request.new_tokens
        self._last.append(request)
        first, last = request.first_token_s, request.ended_s
        if first is not None:
            self._ttft_s.append(first - request.added_s)
            if last is not None and request.new_tokens > 1:
                self._tpot_s.append((last - first) / (request.new_tokens - 1))

    def summary(self, *, seconds: float) -> Summary:
        return Summary(
            requests=sum(self._finishes.values()),
            prompt_tokens=self._prompt,
            new_tokens=self._new,
            shared_tokens=self._shared,
            seconds=seconds,
            ttft_s=percentiles(self._ttft_s),
            tpot_s=percentiles(self._tpot_s),
            finishes=dict(self._finishes),
            last=list(self._last),
        )


def percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """The least value that so many of a hundred do not exceed; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)}
