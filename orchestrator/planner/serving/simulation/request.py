"""A request to simulate serving: the deployment, its limits, the load, and latency limits."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orchestrator.planner.serving.request import ServingRequest
from orchestrator.planner.serving.simulation.load import Load
from workers.contracts.base import Contract, Problem, Refused, problem
from workers.contracts.specs.model import Positive
from workers.contracts.wire.serving_reports import StepCosts

MAX_WORK = 1_000_000  # requests times sequences of an engine: seconds of simulation
Limit = Annotated[float, Field(gt=0, le=1e6)]
Rate = Annotated[float, Field(gt=0, le=1e6)]


class LatencyLimits(Contract):
    """Limits in seconds that `percentile` of requests must meet."""

    ttft_s: Limit | None = None
    tpot_s: Limit | None = None
    percentile: Literal[50, 90, 99] = 99

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if self.ttft_s is None and self.tpot_s is None:
            raise Refused("there is no limit", "Use ttft_s 0.5.", field="ttft_s")
        return self


class Disaggregated(Contract):
    """Replicas that compute prompts only, and replicas that compute answers only."""

    prefill: Positive = 1
    decode: Positive = 1


class SimulationRequest(Contract):
    """What to simulate.

    `serving` describes the deployment; its lengths and `batch` are not used. Limits of one engine
    have the names of a serve run: `max_batch_tokens`, `max_seqs`, `kv_blocks` (default: as many as
    memory holds). `step_costs` replace the predicted duration of steps by those that a server
    measured. `limits` adds the largest rate that meets them, and the cheapest number of replicas
    for the load's rate. `rates` are further rates to simulate.
    """

    serving: ServingRequest
    load: Load
    max_batch_tokens: Positive = 2048
    max_seqs: Positive = 256
    kv_blocks: Positive | None = None
    step_costs: StepCosts | None = None
    limits: LatencyLimits | None = None
    disaggregated: Disaggregated | None = None
    rates: Annotated[list[Rate], Field(max_length=12)] = []

    def problems(self) -> list[Problem]:
        """Problems of the request; empty if it can be simulated."""
        serving, load = self.serving, self.load
        problems = [
            item.model_copy(update={"field": f"serving.{item.field}"})
            for item in serving.problems()
            if item.field != "prompt_len"  # the load has the lengths
        ]
        if serving.pp > 1:
            message = "stages of a pipeline are not simulated"
            problems.append(
                problem("serving.pp", message, f"Use tp {serving.tp * serving.pp}, pp 1.")
            )
        if serving.model.window:
            message = f"{serving.model.name} attends to a window, which is not simulated"
            problems.append(problem("serving.model", message, "Use a model without a window."))
        context = serving.model.max_seq_len
        for name, lengths in (("prompt", load.prompt), ("output", load.output)):
            least = min(lengths.values) if lengths.values else max(lengths.mean, lengths.min)
            if least >= context:
                message = f"{least:g} tokens do not fit in max_seq_len {context} of the model"
                problems.append(problem(f"load.{name}", message, f"Use mean {context // 2}."))
        mean = load.prompt.mean_tokens
        if load.shared_prefix > mean:
            message = f"the shared prefix is longer than the mean prompt of {mean:g} tokens"
            problems.append(problem("load.shared_prefix", message, f"Use {int(mean)}."))
        together = min(load.requests, self.max_seqs)
        if load.requests * together > MAX_WORK:
            message = f"{load.requests} requests, up to {together} at a time, take too long"
            fewer = MAX_WORK // together
            problems.append(problem("load.requests", message, f"Use requests {fewer}."))
        needs_rate = ("limits", "disaggregated", "rates")
        if load.clients is not None and any(getattr(self, name) for name in needs_rate):
            field = next(name for name in needs_rate if getattr(self, name))
            problems.append(
                problem(
                    field, f"{field} requires load.rate; load.clients is set", "Use load.rate 2."
                )
            )
        return problems
