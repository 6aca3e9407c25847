"""Fits what a step of the engine costs per prompt token, decoding sequence and cached token.

Weighted least squares over the newest steps, so that the planner can simulate this server under
another load. Does not depend on the model or the device.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from workers.contracts.wire.serving_reports import StepCosts
from workers.inference.request import Request
from workers.inference.scheduling.step_plan import StepPlan

_FIELDS = ("step_s", "prefill_token_s", "decode_s", "prefill_context_s", "decode_context_s")
_WARM_UP = 3  # first steps, which allocate and tune
_LEAST_STEPS = 50
_FORGET = 0.999  # weight of a step relative to the next one
_OUTLIER = 5.0  # times the fit: another process had the cores, or memory was swapped
_MOST_REJECTED = 10  # in a row: not a pause, but a slower server


class StepCostFit:
    """Call `record` after each step; `costs` are the fitted ones."""

    def __init__(self) -> None:
        self.steps = 0
        self._costs: StepCosts | None = None
        self._rejected = 0  # in a row
        self._reset()

    def record(self, plan: StepPlan, decoding: Collection[Request], seconds: float) -> None:
        """Add a step; `decoding` are its requests that computed one token after their prompt.

        Steps with drafts or several scored rows are left out: their costs differ.
        """
        prefill = decodes = 0
        prefill_context = decode_context = 0.0
        for part in plan.scheduled:
            if part.num_drafts or part.scored:
                return
            if part.request in decoding:
                decodes += 1
                decode_context += part.start + 1
            else:
                prefill += part.count
                prefill_context += part.count * part.start + part.count * (part.count + 1) / 2
        self.steps += 1
        features = (1.0, prefill, decodes, prefill_context, decode_context)
        if self.steps <= _WARM_UP:
            return
        if self._is_outlier(features, seconds):
            self._rejected += 1
            if self._rejected < _MOST_REJECTED:
                return
            self._reset()
        self._rejected = 0
        self._fitted += 1
        weight = 1 / max(seconds, 1e-5)  # else long steps alone would decide
        for index, value in enumerate(features):
            weighted, row = weight * value, self._products[index]
            self._targets[index] = _FORGET * self._targets[index] + weighted * seconds
            for other, second in enumerate(features):
                row[other] = _FORGET * row[other] + weighted * second
        if self._fitted % _LEAST_STEPS == 0:
            self._costs = self._solve()

    def costs(self) -> StepCosts | None:
        """The costs of the newest steps; None before the first 50."""
        return self._solve() if self._fitted >= _LEAST_STEPS else None

    def _reset(self) -> None:
        """Forget all steps: the server has become slower."""
        self._fitted, self._costs = 0, None
        # plain floats: a step is recorded in a few µs, and solved rarely
        self._products = [[0.0] * len(_FIELDS) for _ in _FIELDS]
        self._targets = [0.0] * len(_FIELDS)

    def _is_outlier(self, features: tuple[float, ...], seconds: float) -> bool:
        known = all(self._products[index][index] for index, value in enumerate(features) if value)
        if self._costs is None or not known:  # costs without such work measure nothing
            return False
        costs = (getattr(self._costs, name) for name in _FIELDS)
        fitted: float = sum(cost * count for cost, count in zip(costs, features, strict=True))
        return seconds > _OUTLIER * fitted

    def _solve(self) -> StepCosts:
        """Non-negative least squares: fields with a negative cost are removed one by one."""
        every = torch.tensor(self._products, dtype=torch.float64)
        targets = torch.tensor(self._targets, dtype=torch.float64)
        scale = every.diagonal().sqrt()
        used = [index for index in range(len(_FIELDS)) if scale[index] > 0]
        values = torch.zeros(0, dtype=torch.float64)
        while used:
            chosen = torch.tensor(used)
            scales = scale[chosen]
            products = every[chosen][:, chosen] / torch.outer(scales, scales)
            products += 1e-6 * torch.eye(len(used), dtype=torch.float64)
            values = torch.linalg.solve(products, targets[chosen] / scales) / scales
            lowest = int(values.argmin())
            if values[lowest] >= 0:
                break
            del used[lowest]
        fitted = {
            _FIELDS[index]: float(value) for index, value in zip(used, values.tolist(), strict=True)
        }
        return StepCosts(**{"step_s": 0.0, **fitted}, steps=self.steps)
