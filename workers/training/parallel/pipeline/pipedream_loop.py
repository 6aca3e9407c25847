"""The training loop of PipeDream: every stage updates its weights when its own part of a batch is
done.

No stage waits for another's update, so a step's sums come back some steps later; points are written
then. Knows when
the pipeline is flushed; what runs within it is `pipedream`'s.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NoReturn, cast

from workers.runtime.exits import NumericsError, Outcome
from workers.training.loop.step_report import Told
from workers.training.loop.train import Loop
from workers.training.optim import scale_, set_lr
from workers.training.optim.norm import norm_of
from workers.training.parallel.pipeline.pipedream import PipeDream, unchanged
from workers.training.parallel.pipeline.tied_embedding import NAME
from workers.training.setup.control import strongest
from workers.training.setup.resume import Start


class AsynchronousLoop(Loop):
    """Flushes the pipeline where all stages must stand at the same step: at checkpoints,
    validations and the end.

    A request to stop, pause or save is known when a step's sums are back, and met at a flush as
    many steps later as
    there are stages, because forward passes have run ahead by then.
    """

    leaves_together = False
    _asked: str | None = None
    _flush_at: int | None = None

    def go(self, start: Start) -> Outcome:
        self._pipe.begin(start.step, samples=start.samples)
        self._told: deque[Told] = deque()
        return super().go(start)

    @property
    def _pipe(self) -> PipeDream:
        return cast(PipeDream, self.passes)

    def _one_step(self) -> str | None:
        number = self.step + 1
        self.trace.split.enter("other")
        asked = self.control.poll()
        horizon = self._horizon(number)
        for module in self.parallel.modules:
            module.train()
        loss_sum = self._pipe.turn(number, horizon=horizon, factor=self.soundness.factor)
        self._pipe.finish_gradients(flushing=number == horizon)
        self.phase = "update"
        gradients = self._found_gradients()
        told = self._send(
            number, loss_sum=loss_sum, gradients=gradients, asked=asked, data_s=self._pipe.data_s
        )
        self._told.append(told)
        if self.run.train.clip_norm is not None:
            self._clip(self.run.train.clip_norm)
        set_lr(self.optimizer, told.values["lr"])
        with unchanged(self.parameters.values()):
            self.optimizer.step()
        self.memory.count_state(gradients, self.optimizer)
        self._has_state = True
        self.optimizer.zero_grad(set_to_none=True)
        self.step = number
        while self._told and (number == horizon or len(self._told) > self._pipe.stages):
            self._collect(self._told.popleft())
        if number < horizon:
            return None
        self._pipe.drain()
        self._pipe.begin(number, samples=self.samples)
        found, self._asked, self._flush_at = self._asked, None, None
        return found

    def _clip(self, limit: float) -> None:
        """Bring the norm of what this stage updates by itself to `limit`, and that of a tied
        embedding by itself.

        The global norm is known some steps later, when a spike would have done its harm. An
        embedding's two copies are
        multiplied by the same factor so; the whole gradient's norm is at most sqrt(S + 1) times
        `limit`.
        """
        tied = NAME if self.parallel.ties is not None else ""
        found = {name: each.grad for name, each in self.parameters.items() if each.grad is not None}
        for some in (
            [each for name, each in found.items() if name != tied],
            [found[tied]] if tied in found else [],
        ):
            if some:
                scale_(some, norm=norm_of(some), limit=limit)

    def _horizon(self, number: int) -> int:
        """The first step from `number` on at which the pipeline is flushed."""
        train = self.run.train
        ends = [train.steps]
        for every in (
            train.checkpoint and train.checkpoint.every_steps,
            train.eval and train.eval.every_steps,
        ):
            if every:
                ends.append(-(-number // every) * every)
        if self._flush_at is not None:
            ends.append(self._flush_at)
        return min(ends)

    def _collect(self, told: Told) -> None:
        """Write the step's point; take note of what was asked for."""
        values, sums = self.report.read(told)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self._end(told.step, values)
        asked = strongest(sums["asked"])
        if asked is not None and self._asked is None:
            self._asked = asked
            self._flush_at = min(self.step + self._pipe.stages - 1, self._horizon(self.step))
        self._after_step(told.step, told.tokens, values)

    def _end(self, number: int, values: dict[str, float]) -> NoReturn:
        """Updates were made since; the last checkpoint, before which every step's sums came back,
        is sound.
        """
        self.recorder.point(step=number, tokens=self.tokens, values=values)
        self.recorder.event("non_finite", step=number, **values)
        numbers = f"loss {values['loss']}, grad_norm {values['grad_norm']}"
        raise NumericsError(
            f"step {number} is not finite ({numbers}); try a lower learning rate, or warm-up"
        )
