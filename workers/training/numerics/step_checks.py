"""Checks a step's numbers: fp16 loss scaling, skipped updates, and the error if nothing helps.

Every rank decides the same, from the same global loss and norm. Does not depend on how a step is
computed or updated.
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
from workers.runtime.exit_codes import NumericsError
from workers.training.numerics.loss_scale import LossScaler, ScaleChange
from workers.training.numerics.nan_locator import find_non_finite
from workers.training.parallel.parallelize import Parallel
from workers.training.setup.spec_loading import TrainingRun

# an initial loss scale of 2^16 needs at most a few; more in a row mean that the scale is wrong
SKIPS_BEFORE_WARNING = 8


class StepChecks:
    """The checks of one attempt on one rank. `scaler` is fp16's, None at any other precision."""

    def __init__(
        self,
        run: TrainingRun,
        parallel: Parallel,
        parameters: Mapping[str, Tensor],
        recorder: Recorder,
        *,
        model: str | None = None,
    ):
        """`model`: the name in events of a module that is trained next to the run's own."""
        self.run, self.parallel = run, parallel
        self.parameters, self.recorder = parameters, recorder
        self.scaler = (
            LossScaler(run.plan.loss_scale or LossScale()) if run.plan.precision == "fp16" else None
        )
        self._of = {} if model is None else {"model": model}
        self._loss_was_not_finite = False
        self._skips_in_a_row = 0

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue with the loss scale of a checkpoint, if it has one."""
        if self.scaler and state:
            self.scaler = LossScaler(self.scaler.spec, state)

    @property
    def state(self) -> dict[str, Any] | None:
        """The loss scale for a checkpoint."""
        return self.scaler.state if self.scaler else None

    @property
    def values(self) -> dict[str, float]:
        """Metrics after the update or its skip: the run's number of skipped updates, for fp16."""
        return {"skipped_updates": float(self.scaler.skipped)} if self.scaler else {}

    def loss_factor(self, count: float) -> float:
        """The factor of the summed loss of a step whose mean is over `count`.

        Gradient reductions average over ranks; the result must be the step's mean. fp16
        gradients have the same size under any number of ranks instead, so that they overflow under
        all or none; the update multiplies by the number of ranks.
        """
        if self.scaler:
            return self.scaler.scale / count
        return self.parallel.averaged / count

    @property
    def gradient_scale(self) -> float:
        """The factor of gradients relative to those of the step's mean loss."""
        return self.scaler.scale / self.parallel.averaged if self.scaler else 1.0

    def updated(self, number: int) -> None:
        """Call after the update of step `number`."""
        self._loss_was_not_finite = False
        self._skips_in_a_row = 0
        if self.scaler:
            self._report_scale(number, self.scaler.updated())

    def skip(self, number: int, loss: float) -> bool:
        """Skip the update after an overflow of fp16 gradients and reduce the scale.

        False if no smaller scale helps: without scaling, at the smallest scale, or if the loss
        itself is not finite in two consecutive steps, since scaling applies after the loss.
        """
        scaler, not_finite = self.scaler, not math.isfinite(loss)
        if scaler is None or scaler.exhausted or (not_finite and self._loss_was_not_finite):
            return False
        self._loss_was_not_finite = not_finite
        world, names = self.parallel.world, self.non_finite_gradients()
        counts = torch.zeros(world.size, dtype=torch.float64, device=world.device)
        counts[world.rank] = float(bool(names))
        ranks = [rank for rank, count in enumerate(world.sum_(counts).tolist()) if count]
        if world.rank == 0:
            self.recorder.event(
                "overflow_skipped_step",
                step=number,
                **self._of,
                loss_scale=scaler.scale,
                ranks=ranks,
                parameters=names[:8],
            )
        self._report_scale(number, scaler.overflowed(), ranks=ranks)
        self._skips_in_a_row += 1
        if self._skips_in_a_row == SKIPS_BEFORE_WARNING and world.rank == 0:
            self.recorder.event(
                "learning_warning",
                step=number,
                **self._of,
                kind="skipped_updates",
                now=self._skips_in_a_row,
                scale=scaler.scale,
            )
        return True

    def require_update(self, steps: int) -> None:
        """Raise NumericsError if the run ends after `steps` steps without one update."""
        scaler = self.scaler
        if scaler is None or scaler.updates or not scaler.skipped:
            return
        initial = scaler.spec.initial
        of = f" of the {self._of['model']} model" if self._of else ""
        raise NumericsError(
            f"no update{of} was made in {steps} steps: gradients overflowed in each, and the loss "
            f"scale fell from {initial:g} to {scaler.scale:g}. "
            f"Use plan.loss_scale.initial {scaler.scale:g} or less, more steps, or bf16."
        )

    def non_finite_gradients(self) -> list[str]:
        """Parameters whose gradient on this rank is not finite."""
        return [
            name
            for name, p in self.parameters.items()
            if p.grad is not None and not _all_finite(p.grad)
        ]

    def failure(
        self,
        number: int,
        values: Mapping[str, float],
        *,
        parameters: list[str],
        repeat: Callable[[], object],
    ) -> NumericsError:
        """The error to raise, also recorded as an event; `repeat` runs the step again to find the
        first non-finite number. `parameters`: those with such a gradient.
        """
        source = find_non_finite(self.parallel.parts, self.parallel.world, repeat)
        what = "loss" if not math.isfinite(values["loss"]) else "gradient norm"
        where = (
            f", first in the {source.what} of {source.module} (rank {source.rank})"
            if source
            else ""
        )
        self.recorder.event(
            "non_finite",
            step=number,
            **values,
            what=what + where,
            module=source.module if source else None,
            parameters=parameters[:8],
            parameters_affected=len(parameters),
        )
        where = where or ", but was finite when the step was repeated, which suggests the device"
        numbers = f"loss {values['loss']}, grad_norm {values['grad_norm']}"
        return NumericsError(
            f"the {what} is not finite at step {number} ({numbers}){where}. "
            "Use a lower learning rate, clip_norm 1.0, warm-up, or "
            f"{'bf16' if self.scaler else 'fp32'}."
        )

    def _report_scale(self, number: int, change: ScaleChange | None, **more: list[int]) -> None:
        if change is not None and change.old != change.new and self.parallel.world.rank == 0:
            self.recorder.event(
                "loss_scale_changed",
                step=number,
                **self._of,
                old=change.old,
                new=change.new,
                reason=change.reason,
                **more,
            )


def _all_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(gradient)).all())
