"""The training loop of a GPU: the host reads a step's numbers while the device runs the next step.

The device decides whether to update, clips and updates; the host launches the next forward and
backward passes before it reads loss, norm and requests, so the device is never idle meanwhile.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from workers.training.loop.step_context import StepContext
from workers.training.loop.step_report import PendingReport
from workers.training.loop.train import Loop
from workers.training.numerics.step_checks import StepChecks
from workers.training.optim import set_lr, skips_on_device, update_unread
from workers.training.setup.control import ACTIONS, strongest


def can_read_late(context: StepContext, checks: StepChecks, *, prepares: bool) -> bool:
    """Whether nothing in a step depends on the numbers of the step before.

    fp16's loss scale, biases of experts, prepared samples (`prepares`) and times of a pipeline do,
    and so do updates that cannot be skipped on the device.
    """
    return (
        _runs_ahead(context.world.device)
        and checks.scaler is None
        and context.run.model.moe is None
        and context.run.plan.pp == 1
        and not prepares
        and skips_on_device(context.optimizer)
    )


def _runs_ahead(device: torch.device) -> bool:
    """Whether the host continues while the device computes."""
    return device.type == "cuda"


class LateReadLoop(Loop):
    """Reads each step's sums after the backward pass of the next step is launched.

    Steps that end with a checkpoint or a validation, and those at which a request is known, are
    read at once. A step that is not finite changes no weights; nor does the step launched after it.
    """

    def __init__(self, context: StepContext, **rest: Any) -> None:
        """Takes what `Loop` takes."""
        super().__init__(context, **rest)
        self._pending: PendingReport | None = None

    def _one_step(self) -> str | None:
        number = self.step + 1
        self.trace.time_breakdown.enter("other")
        requests = self.control.poll()
        loss_sum, data_s = self._forward_backward()
        requested = self._read_pending()
        self.progress.enter("update")
        gradients = self._collect_gradients()
        pending = self._send(
            number, loss_sum=loss_sum, gradients=gradients, requests=requests, data_s=data_s
        )
        norm, skip = self.report.decide_on_device(pending)
        set_lr(self.optimizer, pending.values["lr"])
        limit, scale = self.run.train.clip_norm, self.checks.gradient_scale
        update_unread(self.optimizer, norm=norm, limit=limit, scale=scale, skip=skip)
        self._finish_update(gradients)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = number
        self._pending = pending
        if strongest(requested) is None and number < self._next_boundary(number):
            self.trace.time_breakdown.enter(None)
            return None
        late = self._read_pending()
        return strongest([a + b for a, b in zip(requested, late, strict=True)])

    def _read_pending(self) -> list[float]:
        """Write the point of the step that is unread, if one is; its requests, summed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return [0.0] * len(ACTIONS)
        values, sums = self.report.read(pending)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self._fail(pending.step, values)
        part = self.trace.time_breakdown.part
        self._after_step(pending.step, pending.tokens, values)
        self.trace.time_breakdown.enter(part)
        return sums["requests"]

    def _fail(self, number: int, values: dict[str, float]) -> NoReturn:
        """Raise for a step without update, whose samples come before the next ones of the loop."""
        self.progress.step = number - 1
        self.optimizer.zero_grad(set_to_none=True)
        size = self.run.plan.global_batch_size
        self.sample -= size
        self._forward_backward()  # its gradients gave way to those of the next step
        self.sample += size
        super()._fail(number, values)
