"""Learning rates of every schedule at its boundary steps."""

from __future__ import annotations

import pytest

from workers.contracts.specs.train import LrSchedule
from workers.training.loop.lr_schedule import lr_at


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"name": "constant"}, {1: 1.0, 50: 1.0, 100: 1.0}),
        ({"name": "constant", "warmup_steps": 10}, {1: 0.1, 5: 0.5, 10: 1.0, 11: 1.0}),
        ({"name": "linear", "warmup_steps": 20, "min_lr": 0.2}, {20: 1.0, 60: 0.6, 100: 0.2}),
        ({"name": "cosine", "min_lr": 0.1}, {50: 0.55, 100: 0.1}),
        ({"name": "wsd", "warmup_steps": 10}, {10: 1.0, 90: 1.0, 95: 0.5, 100: 0.0}),
        ({"name": "wsd", "decay_steps": 50, "min_lr": 0.5}, {50: 1.0, 75: 0.75, 100: 0.5}),
        ({"name": "wsd", "warmup_steps": 90, "decay_steps": 50}, {90: 1.0, 95: 0.5, 100: 0.0}),
    ],
    ids=str,
)
def test_rates(schedule, rates):
    actual = {
        step: lr_at(step, steps=100, peak=1.0, schedule=LrSchedule.from_dict(schedule))
        for step in rates
    }
    assert actual == pytest.approx(rates)
