"""What an engine and its requests look like from outside: EngineState and RequestTold from live
objects.

Reads; changes nothing. Called in the engine's thread, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from workers.contracts.wire.serving_reports import EngineState, RequestStats
from workers.inference.engine import Engine
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.request import Request
from workers.inference.server.observe.finished_requests import later

_LISTED = 256  # requests of each kind in one state


def engine_state(
    engine: Engine,
    names: Mapping[int, str],
    ended: Sequence[Request],
    *,
    since_s: float,
    draining: bool,
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
        requests=[
            told(each, names.get(each.parent, ""), since_s=since_s) for each in (*live, *ended)
        ],
        ended=len(ended),
        draining=draining,
    )


def merged(states: Sequence[EngineState]) -> EngineState:
    """Several replicas' as one, by the clock of the first."""
    first = states[0]
    requests = [
        later(each, by_s=first.now_s - state.now_s) for state in states for each in state.requests
    ]
    sums = {
        name: sum(getattr(each, name) for each in states)
        for name in ("running", "waiting", "blocks", "used", "ended")
    }
    return first.model_copy(
        update={**sums, "map": "".join(each.map for each in states), "requests": requests}
    )


def block_map(pool: BlockPool) -> str:
    """A letter a block, as EngineState says."""
    letters = []
    for block in range(pool.blocks):
        held = pool.references(block)
        free = "k" if pool.is_sealed(block) else "."
        letters.append(free if held == 0 else "1" if held == 1 else "s")
    return "".join(letters)


def told(request: Request, name: str, *, since_s: float) -> RequestStats:
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
    return RequestStats.model_validate(
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
