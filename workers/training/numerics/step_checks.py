"""Whether a step's numbers are sound: fp16's loss scale, steps that are skipped for it, and the end
where none helps.

Every rank decides alike, by the same global loss and norm. Does not know how a step is made or
updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workers.contracts.specs.plan import LossScale
from workers.metrics.memory import local_tensor
from workers.metrics.recorder import Recorder
from workers.runtime.exits import NumericsError
from workers.training.numerics.loss_scale import Change, LossScaler
from workers.training.numerics.nan_locator import locate
from workers.training.parallel.parallelize import Parallel
from workers.training.setup.spec_loading import TrainingRun


class Soundness:
    """Of one attempt on one rank. `scaler` is fp16's, None in any other precision."""

    def __init__(
        self,
        run: TrainingRun,
        parallel: Parallel,
        parameters: Mapping[str, Tensor],
        recorder: Recorder,
    ):
        self.run, self.parallel, self.parameters, self.recorder = (
            run,
            parallel,
            parameters,
            recorder,
        )
        self.scaler = (
            LossScaler(run.plan.loss_scale or LossScale()) if run.plan.precision == "fp16" else None
        )
        self._loss_was_lost = False

    def restore(self, kept: dict[str, Any] | None) -> None:
        """The scale that a checkpoint was written with, where it has one."""
        if self.scaler and kept:
            self.scaler = LossScaler(self.scaler.spec, kept)

    @property
    def state(self) -> dict[str, Any] | None:
        return self.scaler.state if self.scaler else None

    @property
    def factor(self) -> float:
        """Of the summed token loss. Gradient reductions average over ranks, and a mean over all
        tokens is wanted.

        fp16 gradients are of one size under any number of ranks instead, so that they overflow
        under all or none; the
        update multiplies by it.
        """
        if self.scaler:
            return self.scaler.scale / self.run.tokens_per_step
        return self.parallel.averaged / self.run.tokens_per_step

    @property
    def scale(self) -> float:
        """What `factor` put into gradients beyond the mean over all tokens."""
        return self.scaler.scale / self.parallel.averaged if self.scaler else 1.0

    def updated(self, number: int) -> None:
        """After the update of step `number`."""
        self._loss_was_lost = False
        if self.scaler:
            self._tell_scale(number, self.scaler.updated())

    def skip(self, number: int, loss: float) -> bool:
        """No update: an overflow of fp16 gradients, of which every rank knows by the norm; the
        scale backs off.

        False where no smaller scale helps: without scaling, at the smallest scale, or when the loss
        itself is lost in
        two steps running, since scaling begins after the loss.
        """
        scaler, lost = self.scaler, not math.isfinite(loss)
        if scaler is None or scaler.exhausted or (lost and self._loss_was_lost):
            return False
        self._loss_was_lost = lost
        world, spoiled = self.parallel.world, self.spoiled()
        found = torch.zeros(world.size, dtype=torch.float64, device=world.device)
        found[world.rank] = float(bool(spoiled))
        ranks = [rank for rank, count in enumerate(world.sum_(found).tolist()) if count]
        if world.rank == 0:
            told = {"loss_scale": scaler.scale, "ranks": ranks, "parameters": spoiled[:8]}
            self.recorder.event("overflow_skipped_step", step=number, **told)
        self._tell_scale(number, scaler.overflowed(), ranks=ranks)
        return True

    def spoiled(self) -> list[str]:
        """Parameters of which this rank holds a gradient that is not finite."""
        return [
            name
            for name, p in self.parameters.items()
            if p.grad is not None and not _all_finite(p.grad)
        ]

    def ended(
        self,
        number: int,
        values: Mapping[str, float],
        *,
        spoiled: list[str],
        again: Callable[[], object],
    ) -> NumericsError:
        """The error to raise, told by event: `again` does the step once more, to see where it
        begins.
        """
        culprit = locate(self.parallel.parts, self.parallel.world, again)
        what = "loss" if not math.isfinite(values["loss"]) else "gradient norm"
        where = (
            f", first in the {culprit.what} of {culprit.module} (rank {culprit.rank})"
            if culprit
            else ""
        )
        told = {"what": what + where, "module": culprit.module if culprit else None}
        self.recorder.event(
            "non_finite",
            step=number,
            **values,
            **told,
            parameters=spoiled[:8],
            parameters_affected=len(spoiled),
        )
        where = where or ", but was when the step was done again, which points to the device"
        numbers = f"loss {values['loss']}, grad_norm {values['grad_norm']}"
        return NumericsError(
            f"the {what} is not finite at step {number} ({numbers}){where}; "
            "try a lower learning rate, clip_norm 1.0, warm-up, or "
            f"{'bf16' if self.scaler else 'fp32'}"
        )

    def _tell_scale(self, number: int, change: Change | None, **more: list[int]) -> None:
        if change is not None and change.old != change.new and self.parallel.world.rank == 0:
            told = {"old": change.old, "new": change.new, "reason": change.reason}
            self.recorder.event("loss_scale_changed", step=number, **told, **more)


def _all_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(gradient)).all())
