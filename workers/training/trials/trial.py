"""One trial of a plan: builds its model, trains a few steps by the training loop, frees memory.

Does not depend on the order of trials.
"""

from __future__ import annotations

from pathlib import Path

from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import LrSchedule
from workers.training.benchmark.repeat import Repeat, Requests
from workers.training.data.rows import RowSource
from workers.training.parallel.mesh import World
from workers.training.setup.control import ACTIONS
from workers.training.setup.resume import Start
from workers.training.setup.spec_loading import TrainingRun


class TrialRequests(Requests):
    """Requests to stop the run, and of the policy to end the trial early (`end_trial`)."""

    def __init__(self, directory: Path, *, reads_file: bool) -> None:
        super().__init__(directory, reads_file=reads_file)
        self.end_trial: str | None = None

    def poll(self) -> list[float]:
        """Flags by action; only the first, to stop, can be set."""
        flags = super().poll()
        return [float(bool(flags[0]) or self.end_trial is not None), *[0.0] * (len(ACTIONS) - 1)]


class Trial(Repeat):
    """`train` once, then `measurements`."""

    def train_steps(self, world: World, samples: RowSource) -> int:
        """Train from the first step; the number of steps done. Collective."""
        self.loop = self.build_loop(world, samples, None, 0)
        frozen = self.loop.context.frozen
        if frozen is not None:
            self._load_frozen(world, self.loop, frozen)
        self.loop.run_steps(Start())
        return self.loop.step

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of all steps so far, also of those that are not timed."""
        return [values["step_time_s"] for values in self.points.values]

    @property
    def peak_bytes(self) -> float:
        """The peak of this rank over all steps, as in `measurements`; 0 before the first."""
        return float(self.measurements(warmup_steps=0)["peak_bytes"]) if self.points.values else 0.0

    def release_model(self) -> None:
        """Close files on disk and release the model."""
        if self.trace is not None:
            self.trace.close()
            self.trace = None
        super().release_model()


def trial_run(run: TrainingRun, plan: ParallelPlan, *, steps: int) -> TrainingRun:
    """The run with another plan and `steps` steps, without validation, checkpoints and samples."""
    train = run.train.model_copy(
        update={
            "steps": steps,
            "eval": None,
            "evaluate": None,
            "checkpoint": None,
            "samples": None,
            "accumulate": None,
            "log_every": 1,
            "lr_schedule": LrSchedule(),
        }
    )
    spec = run.spec.model_copy(update={"plan": plan, "train": train})
    return TrainingRun(spec, run.model, plan, train)
