"""How much later than the first rank each rank reaches a step's first gradient reduction.

Ranks leave a step together, so each rank's own clock since then is enough; the delays travel in the
step's all-reduce. The launcher's supervisor watches the collectives within a node; this does not
depend on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.training.trace.clock import Clock, Stamp

_WINDOW_S = 8.0  # a rank that is last for this long is a straggler
_MIN_STEPS = 5
_LATE = 0.25  # of the step's time, in most of the window's steps


class ArrivalTracker:
    """Arrivals of one attempt on one rank, compared within each of `stages` pipeline stages.

    If gradients are unsharded (ZeRO 0, 1), a rank arrives when its own backward pass is done: a
    hook on the parameter whose gradient comes last, since overlapped reductions do not wait before.
    If weights are sharded, the first collective is in the first forward pass, and a rank arrives
    when its batch is loaded.
    """

    def __init__(self, *, rank: int, size: int, stages: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._clock = Clock(device)
        self._reads_late = device.type == "cuda"
        self._peers = size // stages
        self._left = self._arrived = self._clock.now()
        self._finished = time.perf_counter()
        self._begun = False
        # on CUDA: times of the step before, which the device has completed
        self._earlier: tuple[Stamp, Stamp] | None = None
        # per step: time, last rank, its delay in seconds, duration of the step
        self._window: deque[tuple[float, int, float, float]] = deque()
        self._reported: int | None = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Use the model's first parameter, whose gradient comes last; for unsharded gradients."""
        for parameter in parameters:
            if parameter.requires_grad:
                watched: Any = parameter
                watched.register_post_accumulate_grad_hook(self._ready)
                return

    def begin(self) -> None:
        """Call before each forward pass; the step's first counts."""
        if not self._begun:
            self._begun, self._arrived = True, self._clock.now()

    def delays(self) -> list[float]:
        """`[size]`: seconds from the end of the last step to arrival, at this rank's index.

        On CUDA by the device's own clock, and those of the step before: the host does not wait for
        this step.
        """
        step: tuple[Stamp, Stamp] | None = (self._left, self._arrived)
        if self._reads_late:
            step, self._earlier = self._earlier, step
        row = [0.0] * self.size
        row[self.rank] = 0.0 if step is None else self._clock.between(*step)
        return row

    def sums_sent(self) -> None:
        """Call when the step's all-reduce is on the stream: on CUDA ranks leave a step there."""
        if self._reads_late:
            self._left, self._begun = self._clock.now(), False

    def finish_step(self, delays: Sequence[float]) -> float:
        """Call when the step's all-reduce is done, with the sum of all `delays`.

        Returns by how many seconds this rank arrived after the first of its stage.
        """
        now = time.perf_counter()
        step_s, self._finished = now - self._finished, now
        if not self._reads_late:
            self._left, self._begun = now, False
        stage = self._stage(delays, self.rank // self._peers)
        self._remember(now, delays, step_s)
        return stage[self.rank % self._peers] - min(stage)

    def straggler(self) -> dict[str, Any] | None:
        """The rank that is nearly always last by over a quarter of a step; reported once until
        another is.
        """
        window = self._window
        if len(window) < _MIN_STEPS or window[-1][0] - window[0][0] < 0.9 * _WINDOW_S:
            return None
        late = [
            (rank, late_s, step_s) for _, rank, late_s, step_s in window if late_s > _LATE * step_s
        ]
        for rank in {rank for rank, _, _ in late}:
            own = [late_s for each, late_s, _ in late if each == rank]
            if len(own) > 0.8 * len(window):
                if self._reported == rank:
                    return None
                self._reported = rank
                mean_s = sum(own) / len(own)
                shares = [late_s / step_s for each, late_s, step_s in late if each == rank]
                return {
                    "rank": rank,
                    "stage": rank // self._peers,
                    "late_s": round(mean_s, 4),
                    "share": round(sum(shares) / len(shares), 3),
                    "message": f"it reaches its gradients {1000 * mean_s:.0f} ms after the first "
                    "rank in nearly every step",
                }
        if len(late) < 0.4 * len(window):
            self._reported = None
        return None

    def _ready(self, parameter: Tensor) -> None:
        self._arrived = self._clock.now()

    def _stage(self, delays: Sequence[float], stage: int) -> Sequence[float]:
        return delays[stage * self._peers : (stage + 1) * self._peers]

    def _remember(self, now: float, delays: Sequence[float], step_s: float) -> None:
        last_rank, worst_s = 0, 0.0
        for stage in range(self.size // self._peers):
            own = self._stage(delays, stage)
            late_s = max(own) - min(own)
            if late_s > worst_s:
                last_rank, worst_s = stage * self._peers + list(own).index(max(own)), late_s
        self._window.append((now, last_rank, worst_s, step_s))
        while now - self._window[0][0] > _WINDOW_S:
            self._window.popleft()
