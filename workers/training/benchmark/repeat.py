"""One repeat of a variant: builds its model, trains a few steps by the training loop, frees memory.

Does not depend on the order of repeats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome
from workers.training.data.samples import Samples
from workers.training.optim import release
from workers.training.parallel.mesh import World
from workers.training.setup.attempt import Attempt
from workers.training.setup.control import ACTIONS, Control
from workers.training.setup.resume import Start
from workers.training.setup.spec_loading import TrainingRun

OnPoint = Callable[[int, Mapping[str, float]], None]
_HELD = ("params", "grads", "optimizer", "activations", "buffers", "offloaded")


@dataclass(slots=True)
class PointBuffer(Recorder):
    """A recorder that stores points in memory and passes them on; drops events."""

    on_point: OnPoint
    values: list[dict[str, float]] = field(default_factory=list)

    def point(self, *, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Store the point and pass it to `on_point`."""
        self.values.append(dict(values))
        self.on_point(tokens, values)

    def event(self, type_: str, **data: Any) -> None:
        """Dropped: a chosen recomputation or a grown loss scale shows in the numbers."""

    def close(self) -> None:
        """Nothing to close."""


class Requests(Control):
    """The benchmark's requests as a repeat sees them: it can only stop, not save or profile.

    `received` is the action for which this rank was requested to stop.
    """

    def __init__(self, directory: Path, *, reads_file: bool) -> None:
        super().__init__(directory, reads_file=reads_file)
        self.received: str | None = None

    def poll(self) -> list[float]:
        """Flags by action; only the first, to stop, can be set."""
        flags = super().poll()
        requested = next(
            (action for action, flag in zip(ACTIONS, flags, strict=True) if flag), None
        )
        if requested in ("stop", "preempt", "pause"):
            self.received = requested
        return [float(self.received is not None), *[0.0] * (len(ACTIONS) - 1)]


class Repeat(Attempt):
    """`train` once, then `measurements`."""

    def __init__(
        self,
        run: TrainingRun,
        environment: Environment,
        *,
        control: Control,
        beacon: Beacon,
        on_point: OnPoint,
    ) -> None:
        super().__init__(run, environment)
        self.control, self.beacon = control, beacon
        self.recorder = self.points = PointBuffer(on_point)

    def train(self, world: World, samples: Samples) -> Outcome:
        """Run the loop from the first step."""
        self.loop = self.build_loop(world, samples, None, 0)
        return self.loop.run_steps(Start())

    def measurements(self, *, warmup_steps: int) -> dict[str, Any]:
        """Seconds of the timed steps, losses of all steps, and peak bytes, of this rank.

        `peak_bytes` on a GPU is the allocator's; on a CPU the sum of counted categories, since a
        process keeps memory of its earlier repeats.
        """
        timed = self.points.values[warmup_steps:]
        memory = {
            name: max(values.get(f"memory/{name}_bytes", 0.0) for values in timed)
            for name in (*_HELD, "allocated")
        }
        on_cpu = self.loop is None or self.loop.world.device.type == "cpu"
        peak = sum(memory[name] for name in _HELD) if on_cpu else memory["allocated"]
        return {
            "seconds": [values["step_time_s"] for values in timed],
            "losses": [values["loss"] for values in self.points.values],
            "mfu": [values["mfu"] for values in timed],
            "peak_bytes": peak,
            "memory": {name: size for name, size in memory.items() if size},
        }

    def release_model(self) -> None:
        """Close files on disk and release the model."""
        if self.loop is not None:
            release(self.loop.optimizer)
        self.loop = None
        free_memory()


def free_memory() -> None:
    """Collect garbage and empty CUDA's cache."""
    gc.collect()  # wrappers and their hooks are reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
