"""One turn of a variant: its model built, trained a few steps by the ordinary loop, numbers kept,
memory given back.

Knows what a turn leaves behind; not the order of turns.
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
from workers.runtime.exits import Outcome
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
class Kept(Recorder):
    """A recorder that keeps points in memory and passes them on; events of a turn are nobody's."""

    on_point: OnPoint
    values: list[dict[str, float]] = field(default_factory=list)

    def point(self, *, step: int, tokens: int, values: Mapping[str, float]) -> None:
        self.values.append(dict(values))
        self.on_point(tokens, values)

    def event(self, type_: str, **data: Any) -> None:
        """Left out: a chosen recomputation or a grown loss scale shows in the numbers."""

    def close(self) -> None:
        """There is no file."""


class Requests(Control):
    """The benchmark's requests as a turn sees them: it stops where it is to leave, and has nothing
    to save or show.

    `asked` is what this rank was asked to leave for.
    """

    def __init__(self, directory: Path, *, reads_file: bool) -> None:
        super().__init__(directory, reads_file=reads_file)
        self.asked: str | None = None

    def poll(self) -> list[float]:
        flags = super().poll()
        told = next((action for action, flag in zip(ACTIONS, flags, strict=True) if flag), None)
        if told in ("stop", "preempt", "pause"):
            self.asked = told
        return [float(self.asked is not None), *[0.0] * (len(ACTIONS) - 1)]


class Turn(Attempt):
    """`train` once; `numbers` then."""

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
        self.recorder = self.kept = Kept(on_point)

    def train(self, world: World, samples: Samples) -> Outcome:
        self.loop = self.build_loop(world, samples, None, 0)
        return self.loop.run_steps(Start())

    def numbers(self, *, warmup_steps: int) -> dict[str, Any]:
        """Seconds of the timed steps, losses of all, and bytes at their most, of this rank.

        `peak_bytes` on a GPU: the allocator's; on a CPU the categories that are counted, since a
        process keeps what
        its earlier turns allocated.
        """
        timed = self.kept.values[warmup_steps:]
        memory = {
            name: max(values.get(f"memory/{name}_bytes", 0.0) for values in timed)
            for name in (*_HELD, "allocated")
        }
        on_cpu = self.loop is None or self.loop.world.device.type == "cpu"
        peak = sum(memory[name] for name in _HELD) if on_cpu else memory["allocated"]
        return {
            "seconds": [values["step_time_s"] for values in timed],
            "losses": [values["loss"] for values in self.kept.values],
            "mfu": [values["mfu"] for values in timed],
            "peak_bytes": peak,
            "memory": {name: size for name, size in memory.items() if size},
        }

    def let_go(self) -> None:
        """Files on disk closed, and everything of the model forgotten."""
        if self.loop is not None:
            release(self.loop.optimizer)
        self.loop = None
        free_memory()


def free_memory() -> None:
    gc.collect()  # wrappers and their hooks hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
