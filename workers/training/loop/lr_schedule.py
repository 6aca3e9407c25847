"""The learning rate of a step: linear warm-up, then constant, cosine, linear or
warmup-stable-decay.

A pure function of the step. Does not depend on optimizers.
"""

from __future__ import annotations

import math

from workers.contracts.specs.train import LrSchedule


def lr_at(step: int, *, steps: int, peak: float, schedule: LrSchedule) -> float:
    """Learning rate of step 1…`steps`.

    Warm-up reaches `peak` at step `warmup_steps`; the decay reaches `min_lr` at the last step.
    `wsd` (arXiv 2404.06395) falls linearly over the last `decay_steps` (default: a tenth of the
    run).
    """
    warmup, low = schedule.warmup_steps, schedule.min_lr
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    begin = warmup
    if schedule.name == "wsd":
        decay = max(1, steps // 10) if schedule.decay_steps is None else schedule.decay_steps
        begin = max(warmup, steps - decay)
    if step <= begin:
        return peak
    progress = min(1.0, (step - begin) / max(1, steps - begin))
    if schedule.name == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak + (low - peak) * progress
