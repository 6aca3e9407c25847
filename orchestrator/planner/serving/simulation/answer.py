"""Answers a simulation request: one load, and the largest rate within latency limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final

from pydantic import ValidationError

from orchestrator.planner.model.terms import Table
from orchestrator.planner.serving.all_terms import SERVING
from orchestrator.planner.serving.simulation.fleet import (
    FleetRun,
    capacity,
    run_disaggregated,
    run_fleet,
)
from orchestrator.planner.serving.simulation.load import MAX_REQUESTS, Load, draw_requests
from orchestrator.planner.serving.simulation.outcome import outcome
from orchestrator.planner.serving.simulation.replica import EngineLimits, Replica
from orchestrator.planner.serving.simulation.request import SimulationRequest
from orchestrator.planner.serving.simulation.step_times import (
    MeasuredStepTimes,
    RooflineStepTimes,
    StepTimes,
)
from workers.contracts.base import Problem, problem, validation_problems

SIMULATION_FIELDS: Final = tuple(set(SimulationRequest.model_fields) - {"serving"})
_LEAST_REQUESTS: Final = 400  # per simulated rate, and at least 4 per sequence of an engine
_MOST_REQUESTS: Final = 2000
_SEARCH_STEPS: Final = 9  # halvings of the rate's logarithm: within 2% of a factor of 1,000
_MAX_REPLICAS: Final = 4096


class Unanswerable(ValueError):
    """Raised with the problems of a request."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def simulate_serving(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of `outcome`, with `engine`, `devices`, `usd_per_million_tokens`, `step_times`
    and `capacity` (requests/s that the deployment serves while it is full); `saturated` if the
    load's rate is above it: then latencies grow with the number of requests. `by_rate` and
    `search` if they are wanted.

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
    capacity, rate = simulator.capacity, request.load.rate
    answer |= {"capacity": capacity, "saturated": rate is not None and rate > capacity}
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
        prompt = min(request.max_batch_tokens, request.serving.model.max_seq_len)
        serving = request.serving.model_copy(update={"prompt_len": prompt})  # of a step
        self.request = request.model_copy(update={"serving": serving})
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
        self._check_fits()

    @cached_property
    def capacity(self) -> float:
        """Requests/s of the full deployment: of its prefill or its decode replicas, if apart."""
        load, split = self.request.load, self.request.disaggregated
        make = partial(Replica, self.limits, self.times, load.shared_prefix)
        if split is None:
            return self.request.serving.replicas * capacity(load, make, context=self.context)
        return min(
            split.prefill * capacity(load, make, context=self.context, part="prefill"),
            split.decode * capacity(load, make, context=self.context, part="decode"),
        )

    @property
    def _enough(self) -> int:
        """Requests of a simulation whose latencies are those of a steady load."""
        split = self.request.disaggregated
        replicas = split.decode if split else self.request.serving.replicas
        return max(_LEAST_REQUESTS, min(_MOST_REQUESTS, 4 * replicas * self.limits.sequences))

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

    def run(self, load: Load) -> FleetRun:
        """Simulate `load` on this deployment."""
        make = partial(Replica, self.limits, self.times, load.shared_prefix)
        split = self.request.disaggregated
        if split:
            return run_disaggregated(
                load,
                make,
                context=self.context,
                prefill=split.prefill,
                decode=split.decode,
                transfer_s=self._transfer_s,
            )
        return run_fleet(load, make, self.request.serving.replicas, context=self.context)

    def at_rate(self, rate: float) -> dict[str, Any]:
        """`{rate, tokens_per_s, ttft_s, tpot_s, saturated}` at another rate."""
        load = self.request.load.model_copy(update={"rate": rate, "requests": self._enough})
        numbers = outcome(self.run(load))
        names = ("tokens_per_s", "ttft_s", "tpot_s")
        row = {"rate": rate, **{name: numbers[name] for name in names}}
        return {**row, "saturated": rate > self.capacity}

    def search(self) -> dict[str, Any]:
        """`{rate, replicas, rows}`: the largest rate within the limits, and replicas for the load.

        `rate` is null if even a nearly idle server misses the limits. `replicas` are enough for the
        load's rate if each gets its share of `rate`; `devices` and `usd_per_hour` are theirs.
        `rows` has the simulated rates.
        """
        limits, wanted = self.request.limits, self.request.load.rate
        assert limits is not None and wanted is not None
        rows: list[dict[str, Any]] = []
        name = f"p{limits.percentile}"

        def meets(rate: float) -> bool:
            row = self.at_rate(rate)
            values = {field: (row[field] or {}).get(name, 0.0) for field in ("ttft_s", "tpot_s")}
            within = all(
                limit is None or values[field] <= limit
                for field, limit in (("ttft_s", limits.ttft_s), ("tpot_s", limits.tpot_s))
            )
            row["meets"] = within and not row["saturated"]
            rows.append(row)
            return bool(row["meets"])

        rate = self._largest_rate(meets)
        answer: dict[str, Any] = {"rate": rate, "replicas": None}
        serving = self.request.serving
        if rate is not None and self.request.disaggregated is None:
            replicas = math.ceil(wanted * serving.replicas / rate)
            if replicas <= _MAX_REPLICAS:
                devices = replicas * serving.tp
                cost = devices * self.usd_per_hour
                answer |= {"replicas": replicas, "devices": devices, "usd_per_hour": cost}
        answer["rows"] = sorted(rows, key=lambda row: row["rate"])
        return answer

    def _largest_rate(self, meets: Callable[[float], bool]) -> float | None:
        """By bisection of the rate's logarithm between a nearly idle and a full deployment."""
        low, high = self.capacity / 1000, self.capacity
        if not meets(low):
            return None
        if meets(high):
            return high
        for _ in range(_SEARCH_STEPS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low

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

    def _check_fits(self) -> None:
        """Every request must fit next to the common prefix, as the engine's scheduler demands."""
        load, limits = self.request.load, self.limits
        drawn = load.model_copy(update={"requests": MAX_REQUESTS})
        _, pairs = draw_requests(drawn, self.context)
        prefix = load.shared_prefix // limits.block_size
        needed, longest = max(
            (
                limits.blocks_for(prompt + output)
                + prefix
                - min(load.shared_prefix, prompt) // limits.block_size,
                prompt + output,
            )
            for prompt, output in pairs
        )
        if limits.blocks < needed:
            message = (
                f"a request of {longest} tokens needs {needed} cache blocks, a replica has "
                f"{max(0, limits.blocks)}"
            )
            hint = (
                "Use a larger tp, quantize int8, or a smaller load.prompt.max and load.output.max."
            )
            raise Unanswerable([problem("kv_blocks", message, hint)])
