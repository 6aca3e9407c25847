"""Host time of engine steps: scheduling, launching and bookkeeping, without the device's work.

Sampling, which waits for a GPU, and the model's operations on a CPU are not host time. A GPU is
idle during host time that no work in its queue covers. Does not depend on what a step does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostTime:
    """Surround each step with `step`; `seconds` is the host time of all steps so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        self._elsewhere_s = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the engine."""
        began, self._elsewhere_s = time.perf_counter(), 0.0
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began - self._elsewhere_s

    @contextmanager
    def device_work(self) -> Iterator[None]:
        """Inside a step: time that is not the host's own, such as a wait or computation on it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._elsewhere_s += time.perf_counter() - began

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Around operations of the model: host time on a GPU, where they are only launched."""
        if self.device.type == "cuda":
            yield
            return
        with self.device_work():
            yield
