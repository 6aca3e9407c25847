"""EngineState and RequestStats of a live engine, read in its thread between two steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from workers.contracts.wire.serving_reports import EngineState, RequestStats, ServedAdapter
from workers.inference.engine import Engine
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.request import Request
from workers.inference.server.observe.finished_requests import shift_times

_MAX_LISTED = 256  # running requests in one state, and waiting ones


def read_engine_state(
    engine: Engine,
    names: Mapping[int, str],
    finished: Sequence[Request],
    *,
    since_s: float,
    draining: bool,
) -> EngineState:
    """`names` are prompt ids by the number of a request's parent; times count from `since_s`."""
    scheduler = engine.scheduler
    live = [*scheduler.running[:_MAX_LISTED], *list(scheduler.waiting)[:_MAX_LISTED]]
    return EngineState(
        now_s=time.perf_counter() - since_s,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        blocks=scheduler.pool.blocks,
        block_size=scheduler.pool.block_size,
        used=scheduler.pool.used,
        map=block_map(scheduler.pool),
        requests=[
            request_stats(request, names.get(request.parent, ""), since_s=since_s)
            for request in (*live, *finished)
        ],
        ended=len(finished),
        draining=draining,
        adapters=_adapters(engine),
        adapter_slots=0 if engine.adapters is None else engine.adapters.slots.spec.count,
        step_costs=engine.step_costs.costs(),
    )


def _adapters(engine: Engine) -> list[ServedAdapter]:
    scheduler = engine.scheduler
    active = Counter(
        request.adapter for request in (*scheduler.running, *scheduler.waiting) if request.adapter
    )
    loaded = () if engine.adapters is None else engine.adapters.by_name.values()
    return [
        ServedAdapter(
            name=adapter.name,
            path=str(adapter.folder),
            rank=adapter.rank,
            slot=adapter.slot,
            active=active[adapter],
            requests=adapter.requests,
            quantized=adapter.quantized,
        )
        for adapter in loaded
    ]


def merge_states(states: Sequence[EngineState]) -> EngineState:
    """The states of several replicas as one, by the clock of the first."""
    first = states[0]
    requests = [
        shift_times(request, by_s=first.now_s - state.now_s)
        for state in states
        for request in state.requests
    ]
    sums: dict[str, Any] = {
        name: sum(getattr(state, name) for state in states)
        for name in ("running", "waiting", "blocks", "used", "ended")
    }
    sums["adapters"] = _merged_adapters(states)
    block_maps = "".join(state.map for state in states)
    return first.model_copy(update={**sums, "map": block_maps, "requests": requests})


def _merged_adapters(states: Sequence[EngineState]) -> list[ServedAdapter]:
    """Those of the first replica, which all have, with the requests of all."""
    merged = []
    for first in states[0].adapters:
        same = [each for state in states for each in state.adapters if each.name == first.name]
        slots = [each.slot for each in same if each.slot is not None]
        counts = {name: sum(getattr(e, name) for e in same) for name in ("active", "requests")}
        merged.append(first.model_copy(update={**counts, "slot": slots[0] if slots else None}))
    return merged


def block_map(pool: BlockPool) -> str:
    """One letter per block, as EngineState documents."""
    letters = []
    for block in range(pool.blocks):
        references = pool.references(block)
        free = "k" if pool.is_sealed(block) else "."
        letters.append(free if references == 0 else "1" if references == 1 else "s")
    return "".join(letters)


def request_stats(request: Request, name: str, *, since_s: float) -> RequestStats:
    """`name` is the prompt's id; answers after the first append their index to it."""
    output = len(request.tokens) - len(request.prompt)

    def relative(clock_s: float) -> float | None:
        return max(0.0, clock_s - since_s) if clock_s else None

    if request.finish is not None:
        state = "ended"
    elif not request.blocks:
        state = "waiting"
    else:
        state = "decode" if output else "prefill"
    return RequestStats.model_validate(
        {
            "id": f"{name}/{request.answer}" if request.answer else name,
            "state": state,
            "added_s": relative(request.added_s) or 0.0,
            "admitted_s": relative(request.admitted_s),
            "first_token_s": relative(request.first_token_s),
            "ended_s": relative(request.ended_s),
            "prompt_tokens": len(request.prompt),
            "shared_tokens": request.cached_tokens,
            "new_tokens": output,
            "max_new_tokens": request.sampling.max_new_tokens,
            "blocks": len(request.blocks),
            "preemptions": request.preemptions,
            "priority": request.priority,
            "accepted": request.accepted,
            "drafted": request.drafted,
            "adapter": None if request.adapter is None else request.adapter.name,
            "finish": request.finish,
        }
    )
