"""How long after the first rank each came to a step's first reduction of gradients: told in the
step's own collective.

Ranks leave a step together, so each one's own clock from there on is all that is needed. Knows no
supervisor; what a
node sees of its ranks' collectives is the launcher's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_WINDOW_S = 8.0  # a rank that is last for so long is told
_LEAST_STEPS = 5
_LATE = 0.25  # of the step's time, in most of the window's steps


class Arrivals:
    """Of one attempt on one rank; `stages` as pipeline stages come after one another by design.

    Where gradients are whole (ZeRO 0, 1) a rank comes when its own backward pass is done, which a
    hook on the parameter
    that gets its gradient last tells: overlapped reductions wait for nobody before. Where weights
    are sharded or cut,
    the first collective is in the first forward pass, and a rank comes when its batch is there.
    """

    def __init__(self, *, rank: int, size: int, stages: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._peers = size // stages
        self._left = self._came = time.perf_counter()
        self._begun = False
        # when, last rank, seconds late, of a step
        self._window: deque[tuple[float, int, float, float]] = deque()
        self._told: int | None = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """The first parameter of the model gets its gradient last.

        For plans whose gradients are whole only.
        """
        for parameter in parameters:
            if parameter.requires_grad:
                watched: Any = parameter
                watched.register_post_accumulate_grad_hook(self._ready)
                return

    def begin(self) -> None:
        """This rank is about to go into a forward pass; the step's first counts."""
        if not self._begun:
            self._begun, self._came = True, time.perf_counter()

    def told(self) -> Tensor:
        """`[size]`, fp64: seconds from the last step's end to the arrival, in this rank's place."""
        found = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        found[self.rank] = self._came - self._left
        return found

    def left(self, seconds: Sequence[float]) -> float:
        """The step's collective is over, `seconds` is everybody's `told`: how much later than the
        first of its stage
        this rank came."""
        now = time.perf_counter()
        step_s, self._left, self._begun = now - self._left, now, False
        mine = self._stage(seconds, self.rank // self._peers)
        self._remember(now, seconds, step_s)
        return mine[self.rank % self._peers] - min(mine)

    def straggler(self) -> dict[str, Any] | None:
        """The rank that was last by more than a quarter of a step nearly all the time, told once
        until another is.
        """
        window = self._window
        if len(window) < _LEAST_STEPS or window[-1][0] - window[0][0] < 0.9 * _WINDOW_S:
            return None
        late = [
            (rank, late_s, step_s) for _, rank, late_s, step_s in window if late_s > _LATE * step_s
        ]
        ranks = {rank for rank, _, _ in late}
        for rank in ranks:
            own = [late_s for each, late_s, _ in late if each == rank]
            if len(own) > 0.8 * len(window):
                if self._told == rank:
                    return None
                self._told = rank
                mean_s = sum(own) / len(own)
                message = (
                    f"it comes {1000 * mean_s:.0f} ms after the first to its gradients, step "
                    "after step"
                )
                return {
                    "rank": rank,
                    "stage": rank // self._peers,
                    "late_s": round(mean_s, 4),
                    "message": message,
                }
        if len(late) < 0.4 * len(window):
            self._told = None
        return None

    def _ready(self, parameter: Tensor) -> None:
        self._came = time.perf_counter()

    def _stage(self, seconds: Sequence[float], stage: int) -> Sequence[float]:
        return seconds[stage * self._peers : (stage + 1) * self._peers]

    def _remember(self, now: float, seconds: Sequence[float], step_s: float) -> None:
        worst, by = 0, 0.0
        for stage in range(self.size // self._peers):
            mine = self._stage(seconds, stage)
            late_s = max(mine) - min(mine)
            if late_s > by:
                worst, by = stage * self._peers + list(mine).index(max(mine)), late_s
        self._window.append((now, worst, by, step_s))
        while now - self._window[0][0] > _WINDOW_S:
            self._window.popleft()
