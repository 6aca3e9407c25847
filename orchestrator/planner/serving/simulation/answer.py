"""Answers a simulation request: one load, and the largest rate within latency limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from orchestrator.planner.model.terms import Table
from orchestrator.planner.serving.simulation.fleet import FleetRun, run_disaggregated, run_fleet
from orchestrator.planner.serving.simulation.load import Load, draw_requests
from orchestrator.planner.serving.simulation.outcome import outcome
from orchestrator.planner.serving.simulation.replica import EngineLimits, Replica
from orchestrator.planner.serving.simulation.request import SimulationRequest
from orchestrator.planner.serving.simulation.step_times import (
    MeasuredStepTimes,
    RooflineStepTimes,
    StepTimes,
)
from orchestrator.planner.serving.terms import SERVING
from workers.contracts.base import Problem, problem, validation_problems

SIMULATION_FIELDS: Final = tuple(set(SimulationRequest.model_fields) - {"serving"})
_SEARCH_REQUESTS = 400  # per simulation of a search
_SEARCH_STEPS = 9  # halvings of the rate's logarithm: within 2% of a factor of 1,000
_MAX_REPLICAS = 256


class Unanswerable(ValueError):
    """Raised with the problems of a request."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def simulate_serving(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of `outcome`, with `engine`, `devices`, `usd_per_million_tokens` and
    `step_times`; `by_rate` and `search` if they are wanted.

    Raises Unanswerable.
    """
    try:
        request = SimulationRequest.model_validate(dict(fields))
    except ValidationError as error:
        raise Unanswerable(validation_problems(error)) from None
    if problems := request.problems():
        raise Unanswerable(problems)
    simulator = Simulator(request)
    answer = outcome(simulator.run(request.load))
    devices = simulator.devices
    usd_per_s = devices * simulator.usd_per_hour / 3600
    answer |= {
        "engine": {
            "blocks": simulator.limits.blocks,
            "block_size": simulator.limits.block_size,
            "max_batch_tokens": simulator.limits.step_tokens,
            "max_seqs": simulator.limits.sequences,
        },
        "devices": devices,
        "usd_per_million_tokens": usd_per_s / answer["tokens_per_s"] * 1e6,
        "step_times": "measured" if request.step_costs else "predicted",
    }
    if request.rates:
        answer["by_rate"] = [simulator.at_rate(rate) for rate in sorted(request.rates)]
    if request.limits is not None:
        answer["search"] = simulator.search()
    return answer


class Simulator:
    """A deployment whose loads are simulated. Raises Unanswerable if it holds no request."""

    def __init__(self, request: SimulationRequest) -> None:
        self.request, serving = request, request.serving
        columns = serving.columns()
        self._table = Table({**columns, "batch": float(serving.replicas)}, 1, SERVING)
        self.usd_per_hour = float(columns["usd_per_hour"])
        self.times: StepTimes = (
            RooflineStepTimes(columns, float(self._table["weights_bytes"]))
            if request.step_costs is None
            else MeasuredStepTimes(request.step_costs)
        )
        blocks = request.kv_blocks or self._blocks()
        self.limits = EngineLimits(
            blocks, serving.block_size, request.max_batch_tokens, request.max_seqs
        )
        self._check_capacity()

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.request.serving.model.max_seq_len

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        split = self.request.disaggregated
        replicas = split.prefill + split.decode if split else self.request.serving.replicas
        return self.request.serving.tp * replicas

    def run(self, load: Load, replicas: int | None = None) -> FleetRun:
        """Simulate `load` on this deployment, or on another number of replicas."""
        make = partial(Replica, self.limits, self.times, load.shared_prefix)
        split = self.request.disaggregated
        if split and replicas is None:
            return run_disaggregated(
                load,
                make,
                context=self.context,
                prefill=split.prefill,
                decode=split.decode,
                transfer_s=self._transfer_s,
            )
        count = replicas or self.request.serving.replicas
        return run_fleet(load, make, count, context=self.context)

    def at_rate(self, rate: float, replicas: int | None = None) -> dict[str, Any]:
        """`{rate, tokens_per_s, ttft_s, tpot_s, saturated}` at another rate, of fewer requests."""
        count = min(self.request.load.requests, _SEARCH_REQUESTS)
        load = self.request.load.model_copy(update={"rate": rate, "requests": count})
        numbers = outcome(self.run(load, replicas))
        names = ("tokens_per_s", "ttft_s", "tpot_s", "saturated")
        return {"rate": rate, **{name: numbers[name] for name in names}}

    def search(self) -> dict[str, Any]:
        """`{rate, replicas, rows}`: the largest rate within the limits, and replicas for the load.

        `rate` is null if even a nearly idle server misses the limits. `replicas` is the smallest
        number that meets the limits at the load's rate, `devices` and `usd_per_hour` are theirs.
        `rows` has the simulated rates.
        """
        limits, load = self.request.limits, self.request.load
        assert limits is not None and load.rate is not None
        rows: list[dict[str, Any]] = []
        name = f"p{limits.percentile}"

        def meets(rate: float, replicas: int | None) -> bool:
            row = self.at_rate(rate, replicas)
            values = {field: (row[field] or {}).get(name, 0.0) for field in ("ttft_s", "tpot_s")}
            within = all(
                limit is None or values[field] <= limit
                for field, limit in (("ttft_s", limits.ttft_s), ("tpot_s", limits.tpot_s))
            )
            row["meets"] = within and not row["saturated"]
            if replicas is None:
                rows.append(row)
            return bool(row["meets"])

        rate = self._largest_rate(lambda rate: meets(rate, None))
        answer: dict[str, Any] = {"rate": rate, "replicas": None}
        if rate is not None and self.request.disaggregated is None:
            answer |= self._cheapest(load.rate, rate, meets)
        answer["rows"] = sorted(rows, key=lambda row: row["rate"])
        return answer

    def _largest_rate(self, meets: Any) -> float | None:
        """By bisection of the rate's logarithm between a nearly idle and a full server."""
        full = self._capacity()
        low, high = full / 1000, full * 1.5
        if not meets(low):
            return None
        for _ in range(_SEARCH_STEPS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low

    def _cheapest(self, wanted: float, rate: float, meets: Any) -> dict[str, Any]:
        """The fewest replicas for the wanted rate; one replica's share of `rate` is the start."""
        serving = self.request.serving
        replicas = max(1, math.floor(wanted / (rate / serving.replicas)))
        while replicas <= _MAX_REPLICAS and not meets(wanted, replicas):
            replicas += 1
        if replicas > _MAX_REPLICAS:
            return {}
        devices = replicas * serving.tp
        return {
            "replicas": replicas,
            "devices": devices,
            "usd_per_hour": devices * self.usd_per_hour,
        }

    def _capacity(self) -> float:
        """Requests/s with the engine always full."""
        load = self.request.load
        count = min(load.requests, _SEARCH_REQUESTS)
        split = self.request.disaggregated
        replicas = split.decode if split else self.request.serving.replicas
        clients = min(count, replicas * self.limits.sequences)
        full = load.model_copy(update={"rate": None, "clients": clients, "requests": count})
        return float(outcome(self.run(full, replicas))["requests_per_s"])

    def _blocks(self) -> int:
        """Cache blocks of one engine in the memory that weights and activations leave."""
        serving, table = self.request.serving, self._table
        per_sequence = float(table["kv_bytes_per_sequence_device"])
        tokens = float(table["kv_tokens_per_sequence"])
        per_block = per_sequence / tokens * serving.block_size
        return int(float(table["kv_room_bytes"]) / per_block)

    def _transfer_s(self, tokens: int) -> float:
        """Seconds to send the keys and values of a prompt to another replica."""
        columns = self.request.serving.columns()
        size = tokens * float(self._table["kv_bytes_per_token"])
        return size / float(columns["pp_bandwidth"]) + float(columns["collective_latency_s"])

    def _check_capacity(self) -> None:
        """Every request must fit alone, as the engine's scheduler demands."""
        _, pairs = draw_requests(self.request.load, self.context)
        longest = max(prompt + output for prompt, output in pairs)
        needed = self.limits.blocks_for(longest)
        if self.limits.blocks < needed:
            message = (
                f"a request of {longest} tokens needs {needed} cache blocks, a replica has "
                f"{max(0, self.limits.blocks)}"
            )
            hint = "a larger tp, serving.quantize int8, or shorter requests"
            raise Unanswerable([problem("kv_blocks", message, hint)])
