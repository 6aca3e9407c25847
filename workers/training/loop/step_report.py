"""A step's numbers: this rank's share of each goes into the step's one message, and metrics are
read from its sums.

Knows who tells which number; does not know the order of a step, nor when points are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.metrics.recorder import Recorder
from workers.metrics.throughput import Throughput
from workers.models.moe.balance_control import Balancer
from workers.training.loop.microbatches import Setting
from workers.training.loop.step_sums import Sums
from workers.training.numerics.layer_names import group_names, group_of
from workers.training.numerics.step_checks import Soundness
from workers.training.numerics.underflow import shares, zeros_by_layer
from workers.training.optim import Norms
from workers.training.parallel.arrival_skew import Arrivals
from workers.training.trace.step_trace import Moments

# logged steps between weight norms: weights move slowly, and to read them costs what the gradients
# did (7 ms of 15M)
WEIGHTS_EVERY = 10


@dataclass(slots=True)
class Told:
    """A step whose sums are on their way.

    `first` is its first sample, `tokens` are those until its end.
    """

    step: int
    first: int
    tokens: int
    values: dict[str, float]
    sums: Sums
    moments: Moments | None


class Report:
    """`send` on every rank, then `read`: at once, or steps later."""

    def __init__(
        self,
        setting: Setting,
        *,
        balancer: Balancer | None,
        soundness: Soundness,
        arrivals: Arrivals | None,
        throughput: Throughput,
        recorder: Recorder,
        node: str | None,
    ) -> None:
        """`arrivals` where ranks leave a step together, so that their next ones can be compared.

        `node`: where this rank is, if there are several.
        """
        self.setting, self.run, self.world, self.trace = (
            setting,
            setting.run,
            setting.world,
            setting.trace,
        )
        self.balancer, self.soundness, self.arrivals = balancer, soundness, arrivals
        self.throughput, self.recorder, self.node = throughput, recorder, node
        self.parameters = setting.parallel.parameters()
        self.groups = group_names(self.run.model.layers)
        self.norms = Norms(
            [group_of(name, self.run.model.layers) for name in self.parameters],
            [setting.parallel.holders(name, each) for name, each in self.parameters.items()],
            count=len(self.groups),
        )

    def send(
        self,
        step: int,
        *,
        first: int,
        tokens: int,
        loss_sum: Tensor,
        gradients: Sequence[Tensor],
        asked: list[float],
        values: dict[str, float],
    ) -> Told:
        """The only collective of a step besides the gradients' own: loss, norms, duration and
        requests travel together.

        `loss_sum` is this rank's share, `asked` its requests by strength; `values` are numbers that
        all ranks know.
        Called after the step's gradients are reduced and before their update.
        """
        sums, share = Sums(self.world), self.setting.share
        sums.put("loss", loss_sum)
        sums.put("norms", self.norms.squares(gradients))
        sums.put("asked", asked)
        if self.arrivals:
            sums.put("arrivals", self.arrivals.told())
        if self.setting.by_source:
            sums.put("by_source", self.setting.by_source.take() * share)
        if self.run.train.logs(step):
            if self.soundness.scaler:
                sums.put("underflow", zeros_by_layer(self.parameters, self.run.model.layers))
            if self._tells_weights(step):
                sums.put("weights", self.norms.squares(list(self.parameters.values())))
        if self.balancer:
            sums.put("balance", self.balancer.take(self.world.device) * share)
        moments = self.trace.moments()
        if moments is not None:
            sums.put("pipeline", moments.row)
        sums.put("seconds", self.trace.split.cut())
        sums.send()
        return Told(step, first, tokens, values, sums, moments)

    def read(self, told: Told) -> tuple[dict[str, float], dict[str, list[float]]]:
        """The step's metrics, and the sums they were read from."""
        sums, size = told.sums.total(), self.run.plan.global_batch_size
        values = dict(told.values) | self.trace.summed(
            told.step, sums.get("pipeline"), told.moments
        )
        self.throughput.step(
            seconds=sums["seconds"][0] / self.world.size, tokens=self.run.tokens_per_step
        )
        values["loss"] = sums["loss"][0] / self.run.tokens_per_step
        values["grad_norm"] = math.sqrt(sum(sums["norms"])) / self.soundness.scale
        if self.arrivals:
            values |= self._arrived(told.step, sums["arrivals"])
        if self.setting.by_source:
            values |= self.setting.by_source.values(sums["by_source"], first=told.first, count=size)
        if self.soundness.scaler:
            values |= {
                "loss_scale": self.soundness.scaler.scale,
                **shares(sums.get("underflow", [])),
            }
        if self.balancer:
            values |= self.balancer.values(sums["balance"], sequences=size)
        if self.world.rank == 0:  # twice as many as layers: told once, not by every rank
            values |= self._by_layer("grad_norm", sums["norms"], self.soundness.scale)
            values |= self._by_layer("weight_norm", sums.get("weights", []), 1.0)
        return values, sums

    def _by_layer(self, name: str, squares: list[float], scale: float) -> dict[str, float]:
        return {
            f"{name}/{group}": math.sqrt(square) / scale
            for group, square in zip(self.groups if squares else (), squares, strict=True)
        }

    def _tells_weights(self, step: int) -> bool:
        """Of the logged steps every tenth, the first and the last."""
        every = self.run.train.log_every
        return step % (every * WEIGHTS_EVERY) == 0 or step <= every or step == self.run.train.steps

    def _arrived(self, step: int, seconds: list[float]) -> dict[str, float]:
        assert self.arrivals is not None
        late_s = self.arrivals.left(seconds)
        # a node's supervisor sees its own ranks' every collective; over several nodes this is what
        # there is, and the
        # late rank itself tells it: it knows its node
        found = self.arrivals.straggler() if self.node else None
        if found is not None and found["rank"] == self.world.rank:
            self.recorder.event("straggler", step=step, node=self.node, **found)
        return {"comm/arrival_skew_s": late_s} if self.world.size > 1 else {}
