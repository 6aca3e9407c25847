"""Runs a load on simulated replicas, also with prefill and decode on separate ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from orchestrator.planner.serving.simulation.load import Load, draw_requests
from orchestrator.planner.serving.simulation.replica import Replica, SimulatedRequest

Part = Literal["all", "prefill", "decode"]
_MOST_CLIENTS: Final = 1024
_ROUNDS: Final = 4  # requests per client


@dataclass(slots=True)
class FleetRun:
    """Finished requests in order of arrival, and the replicas that computed them."""

    requests: list[SimulatedRequest]
    replicas: list[Replica]


def run_fleet(load: Load, make: Callable[[], Replica], replicas: int, *, context: int) -> FleetRun:
    """Each request goes to the replica with the fewest unfinished requests."""
    arrivals, pairs = draw_requests(load, context)
    fleet = [make() for _ in range(replicas)]
    if load.clients is None:
        requests = [
            SimulatedRequest(number, float(at), *lengths)
            for number, (at, lengths) in enumerate(zip(arrivals, pairs, strict=True))
        ]
        for request in requests:
            _send(fleet, request)
    else:
        requests = [SimulatedRequest(number, 0.0, *pair) for number, pair in enumerate(pairs)]
        _run_clients(fleet, requests, load.clients)
    for replica in fleet:
        replica.advance(float("inf"))
    return FleetRun(requests, fleet)


def run_disaggregated(
    load: Load,
    make: Callable[[], Replica],
    *,
    context: int,
    prefill: int,
    decode: int,
    transfer_s: Callable[[int], float],
) -> FleetRun:
    """Prompts on `prefill` replicas, answers on `decode` ones; `transfer_s` of a prompt's tokens.

    After DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670): the first token comes from the
    prefill replica; the next one has to wait until keys and values have been sent.
    """
    _, pairs = draw_requests(load, context)
    prompts_only = load.model_copy(update={"output": load.output.model_copy(update=_ONE_TOKEN)})
    first = run_fleet(prompts_only, make, prefill, context=context)
    fleet = [make() for _ in range(decode)]
    finished = []
    for done in sorted(first.requests, key=lambda one: one.end_s):
        output = pairs[done.number][1]
        if output == 1:
            finished.append(done)
            continue
        request = SimulatedRequest(
            done.number,
            done.end_s + transfer_s(done.prompt),
            done.prompt,
            output,
            received=done.prompt,
            produced=1,
            first_token_s=done.first_token_s,
        )
        finished.append(request)
        _send(fleet, request)
    for replica in fleet:
        replica.advance(float("inf"))
    for request in finished:
        request.arrival = first.requests[request.number].arrival
        request.admitted_s = first.requests[request.number].admitted_s
    finished.sort(key=lambda one: one.number)
    return FleetRun(finished, [*first.replicas, *fleet])


def capacity(load: Load, make: Callable[[], Replica], *, context: int, part: Part = "all") -> float:
    """Requests/s of one replica that is always full; of prompts or answers alone by `part`.

    By clients that each wait for their answer, between the first and the last quarter of answers.
    """
    replica = make()
    clients = min(replica.limits.sequences, _MOST_CLIENTS)
    closed = load.model_copy(
        update={"rate": None, "clients": clients, "requests": _ROUNDS * clients}
    )
    _, pairs = draw_requests(closed, context)
    if part == "prefill":
        pairs = [(prompt, 1) for prompt, _ in pairs]
    elif part == "decode":
        pairs = [pair for pair in pairs if pair[1] > 1]
        if not pairs:
            return float("inf")
    requests = [
        SimulatedRequest(number, 0.0, prompt, output, received=prompt, produced=1)
        if part == "decode"
        else SimulatedRequest(number, 0.0, prompt, output)
        for number, (prompt, output) in enumerate(pairs)
    ]
    _run_clients([replica], requests, clients)
    ends = sorted(request.end_s for request in requests)
    first, last = len(ends) // 4, (3 * len(ends)) // 4
    share = len(pairs) / closed.requests  # answers of one token need no decode replica
    return (last - first) / max(ends[last] - ends[first], 1e-9) / share


_ONE_TOKEN = {"mean": 1.0, "cv": 0.0, "values": None, "min": 1}


def _run_clients(fleet: list[Replica], requests: list[SimulatedRequest], clients: int) -> None:
    """Each of the clients sends the next request when its last one has ended."""
    following = iter(requests[clients:])
    for request in requests[:clients]:
        _idlest(fleet).add(request)
    while any(replica.busy for replica in fleet):
        replica = min((one for one in fleet if one.busy), key=lambda one: one.now)
        done = len(replica.finished)
        replica.step()
        for ended in replica.finished[done:]:
            if (successor := next(following, None)) is not None:
                successor.arrival = ended.end_s
                _idlest(fleet).add(successor)


def _send(fleet: list[Replica], request: SimulatedRequest) -> None:
    for replica in fleet:
        replica.advance(request.arrival)
    _idlest(fleet).add(request)


def _idlest(fleet: list[Replica]) -> Replica:
    return min(fleet, key=lambda replica: replica.unfinished)
