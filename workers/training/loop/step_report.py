"""Metrics of a step: this rank's shares go into one all-reduce; metrics are computed from the sums.

Does not depend on the order of a step or on when points are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.metrics.throughput import Throughput
from workers.models.moe.balance_control import Balancer
from workers.training.loop.step_context import StepContext
from workers.training.loop.step_sums import Sums
from workers.training.numerics.layer_names import group_names, group_of
from workers.training.numerics.step_checks import StepChecks
from workers.training.numerics.underflow import underflow_metrics, zeros_by_layer
from workers.training.optim import Norms
from workers.training.parallel.arrival_skew import ArrivalTracker
from workers.training.trace.step_trace import PipelineTimes

# logged steps between weight norms: weights change slowly, and reading them costs as much as
# reading the gradients (7 ms for 15M parameters)
WEIGHTS_EVERY = 10


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A step whose all-reduce is in flight; `first`: its first sample, `tokens`: until its end.

    `step_tokens`: its own. `count`: the divisor of its losses.
    """

    step: int
    first: int
    count: float
    tokens: int
    step_tokens: int
    values: dict[str, float]
    sums: Sums
    pipeline_times: PipelineTimes | None


class StepReport:
    """Call `send` on every rank, then `read`: at once, or some steps later."""

    def __init__(
        self,
        context: StepContext,
        *,
        balancer: Balancer | None,
        checks: StepChecks,
        arrivals: ArrivalTracker | None,
        throughput: Throughput,
        node: str | None,
    ) -> None:
        """`arrivals` is set if ranks leave a step at the same time, so that arrivals compare.

        `node`: this rank's node, if there are several.
        """
        self.context, self.run, self.world = context, context.run, context.world
        self.trace, self.recorder = context.trace, context.recorder
        self.balancer, self.checks, self.arrivals = balancer, checks, arrivals
        self.throughput, self.node = throughput, node
        self.parameters = context.parallel.parameters()
        layers = self.run.model.layers
        self.groups = group_names(layers)
        self.norms = Norms(
            [group_of(name, layers) for name in self.parameters],
            [context.parallel.copies_of(name, each) for name, each in self.parameters.items()],
            count=len(self.groups),
        )

    def send(
        self,
        step: int,
        *,
        first: int,
        count: float,
        tokens: int,
        step_tokens: int,
        loss_sum: Tensor,
        gradients: Sequence[Tensor],
        requests: list[float],
        values: dict[str, float],
    ) -> PendingReport:
        """Start a step's only collective besides the gradients': loss, norms, times and requests.

        `loss_sum` is this rank's share, `requests` its requests by priority, `values` numbers that
        all ranks have. Call it after gradients are reduced and before their update.
        """
        sums, share = Sums(self.world), self.context.loss_share
        sums.put("loss", loss_sum)
        sums.put("objective", self.context.objective.take(self.world.device) * share)
        if self.context.selects_logits:
            sums.put("logits", [self.context.logits_count.take()])
        sums.put("norms", self.norms.squares(gradients))
        sums.put("requests", requests)
        if self.arrivals:
            sums.put("arrivals", self.arrivals.delays())
        if self.context.source_losses:
            sums.put("by_source", self.context.source_losses.take() * share)
        if self.run.train.logs(step):
            if self.checks.scaler:
                sums.put("underflow", zeros_by_layer(self.parameters, self.run.model.layers))
            if self._logs_weights(step):
                sums.put("weights", self.norms.squares(list(self.parameters.values())))
        if self.balancer:
            sums.put("balance", self.balancer.take(self.world.device) * share)
        pipeline_times = self.trace.pipeline_times()
        if pipeline_times is not None:
            sums.put("pipeline", pipeline_times.row)
        sums.put("seconds", self.trace.time_breakdown.end_step())
        sums.send()
        if self.arrivals:
            self.arrivals.sums_sent()
        return PendingReport(step, first, count, tokens, step_tokens, values, sums, pipeline_times)

    def read(self, pending: PendingReport) -> tuple[dict[str, float], dict[str, list[float]]]:
        """The step's metrics, and the sums they were computed from."""
        sums, size = pending.sums.total(), self.run.plan.global_batch_size
        values = dict(pending.values) | self.trace.pipeline_values(
            pending.step, sums.get("pipeline"), pending.pipeline_times
        )
        self.throughput.step(
            seconds=sums["seconds"][0] / self.world.size,
            tokens=pending.step_tokens,
            with_logits=sums["logits"][0] if "logits" in sums else None,
        )
        values["loss"] = sums["loss"][0] / pending.count
        values |= self.context.objective.values(sums["objective"], count=pending.count)
        values["grad_norm"] = math.sqrt(sum(sums["norms"])) / self.checks.gradient_scale
        if self.arrivals:
            values |= self._arrival_metrics(pending.step, sums["arrivals"])
        if self.context.source_losses:
            values |= self.context.source_losses.values(
                sums["by_source"], first=pending.first, count=size
            )
        if self.checks.scaler:
            values |= {
                "loss_scale": self.checks.scaler.scale,
                **underflow_metrics(sums.get("underflow", [])),
            }
        if self.balancer:
            values |= self.balancer.values(sums["balance"], sequences=size)
        if self.world.rank == 0:  # twice as many as layers: recorded once, not by every rank
            values |= self._by_layer("grad_norm", sums["norms"], self.checks.gradient_scale)
            values |= self._by_layer("weight_norm", sums.get("weights", []), 1.0)
        return values, sums

    def decide_on_device(self, pending: PendingReport) -> tuple[Tensor, Tensor]:
        """`(norm, skip)` of a step that the host has not read: the gradients' norm in fp64, and
        fp32 `[1]`, not zero if loss or norm is not finite.
        """
        norm = pending.sums.on_device("norms").sum().sqrt() / self.checks.gradient_scale
        finite = (pending.sums.on_device("loss").sum() + norm).isfinite()
        return norm, (~finite).float().reshape(1)

    def _by_layer(self, name: str, squares: list[float], scale: float) -> dict[str, float]:
        return {
            f"{name}/{group}": math.sqrt(square) / scale
            for group, square in zip(self.groups if squares else (), squares, strict=True)
        }

    def _logs_weights(self, step: int) -> bool:
        """True for every tenth logged step, the first and the last."""
        every = self.run.train.log_every
        return step % (every * WEIGHTS_EVERY) == 0 or step <= every or step == self.run.train.steps

    def _arrival_metrics(self, step: int, delays: list[float]) -> dict[str, float]:
        assert self.arrivals is not None
        late_s = self.arrivals.finish_step(delays)
        # a node's supervisor sees every collective of its own ranks; across nodes only this is
        # known, and the late rank reports itself with its node
        straggler = self.arrivals.straggler() if self.node else None
        if straggler is not None and straggler["rank"] == self.world.rank:
            self.recorder.event("straggler", step=step, node=self.node, **straggler)
        return {"comm/arrival_skew_s": late_s} if self.world.size > 1 else {}
