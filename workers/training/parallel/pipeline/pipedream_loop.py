"""The training loop of PipeDream: each stage updates its weights when its part of a batch is done.

No stage waits for another's update, so a step's sums return some steps later; points are written
then. Decides when the pipeline is flushed; `pipedream` runs the batches.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NoReturn

from workers.runtime.exit_codes import NumericsError, Outcome
from workers.training.loop.step_context import StepContext
from workers.training.loop.step_report import PendingReport
from workers.training.loop.train import Loop
from workers.training.optim import scale_, set_lr
from workers.training.optim.norm import local_norm
from workers.training.parallel.pipeline.pipedream import PipeDreamRunner, unversioned
from workers.training.parallel.pipeline.tied_embedding import NAME
from workers.training.setup.control import strongest
from workers.training.setup.resume import Start


class PipeDreamLoop(Loop):
    """Flushes the pipeline when all stages must be at the same step: at checkpoints, validations
    and the end.

    A request to stop, pause or save is known when a step's sums are back, and handled at a flush as
    many steps later as there are stages, because forward passes have run ahead by then.
    """

    def __init__(self, context: StepContext, *, runner: PipeDreamRunner, **rest: Any) -> None:
        """Takes what `Loop` takes."""
        super().__init__(context, runner=runner, **rest)
        self.pipeline = runner
        self._requested: str | None = None
        self._flush_at: int | None = None
        self._pending: deque[PendingReport] = deque()

    def run_steps(self, start: Start) -> Outcome:
        """See `Loop`."""
        self.pipeline.begin(start.step, samples=start.samples)
        return super().run_steps(start)

    def _one_step(self) -> str | None:
        number = self.step + 1
        self.trace.time_breakdown.enter("other")
        requests = self.control.poll()
        horizon = self._horizon(number)
        for module in self.parallel.modules:
            module.train()
        loss_sum = self.pipeline.turn(number, horizon=horizon, factor=self.loss_factor)
        self.pipeline.finish_gradients(flushing=number == horizon)
        self.progress.enter("update")
        gradients = self._collect_gradients()
        pending = self._send(
            number,
            loss_sum=loss_sum,
            gradients=gradients,
            requests=requests,
            data_s=self.pipeline.data_s,
        )
        self._pending.append(pending)
        if self.run.train.clip_norm is not None:
            self._clip(self.run.train.clip_norm)
        set_lr(self.optimizer, pending.values["lr"])
        with unversioned(self.parameters.values()):
            self.optimizer.step()
        self.memory.count_state(gradients, self.optimizer)
        self._has_state = True
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = number
        while self._pending and (number == horizon or len(self._pending) > self.pipeline.stages):
            self._read(self._pending.popleft())
        if number < horizon:
            return None
        self.pipeline.drain()
        self.pipeline.begin(number, samples=self.sample)
        request, self._requested, self._flush_at = self._requested, None, None
        return request

    def _clip(self, limit: float) -> None:
        """Clip the norm of this stage's own gradients to `limit`, and separately that of a tied
        embedding.

        The global norm is known some steps later, too late for a spike. Both copies of an embedding
        are multiplied by the same factor this way; the norm of the full gradient is at most
        sqrt(S + 1) times `limit`.
        """
        tied = NAME if self.parallel.tied_embedding is not None else ""
        gradients = {
            name: each.grad for name, each in self.parameters.items() if each.grad is not None
        }
        for group in (
            [each for name, each in gradients.items() if name != tied],
            [gradients[tied]] if tied in gradients else [],
        ):
            if group:
                scale_(group, norm=local_norm(group), limit=limit)

    def _horizon(self, number: int) -> int:
        """The first step from `number` on at which the pipeline is flushed."""
        boundary = self._next_boundary(number)
        return boundary if self._flush_at is None else min(boundary, self._flush_at)

    def _read(self, pending: PendingReport) -> None:
        """Write the step's point; schedule a flush for a request."""
        values, sums = self.report.read(pending)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self._fail(pending.step, values)
        request = strongest(sums["requests"])
        if request is not None and self._requested is None:
            self._requested = request
            self._flush_at = min(self.step + self.pipeline.stages - 1, self._horizon(self.step))
        self._after_step(pending.step, pending.tokens, values)

    def _fail(self, number: int, values: dict[str, float]) -> NoReturn:
        """Later updates were made already; the last checkpoint, written at a flush, is sound."""
        self.recorder.point(step=number, tokens=self.tokens, values=values)
        self.recorder.event("non_finite", step=number, **values)
        numbers = f"loss {values['loss']}, grad_norm {values['grad_norm']}"
        raise NumericsError(
            f"step {number} is not finite ({numbers}). Use a lower learning rate, or warm-up."
        )
