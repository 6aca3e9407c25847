"""What the loop's trace is made of, behind one door: time split, waits, bytes, pipeline, profiles
on demand.

Knows when each is due; does not measure by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from workers.contracts.specs.plan import SPLIT_BACKWARD
from workers.metrics.recorder import Recorder
from workers.training.parallel.parallelize import Parallel
from workers.training.parallel.pipeline.stage_layers import stages_on_rank
from workers.training.setup.spec_loading import TrainingRun
from workers.training.trace.clock import Clock
from workers.training.trace.profiles import memory_recorded, memory_tracked, profiled
from workers.training.trace.time_breakdown import StepSplit
from workers.training.trace.timeline import Action, Timeline
from workers.training.trace.waits import Waits

ACTIONS = ("profile", "memory_snapshot")
# steps of an attempt: by the third, DDP's buckets and all shapes are settled
_TIMELINE_AT, _BYTES_AT = 2, 3
_TIMELINES_EVERY = 50  # logged steps


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one step in the pipeline: `row` to be summed over ranks, `actions` for a timeline."""

    row: Tensor
    actions: list[Action]


class Trace:
    """Of one attempt on one rank. `close` gives torch's functions back."""

    def __init__(
        self,
        run: TrainingRun,
        parallel: Parallel,
        optimizer: Optimizer,
        *,
        recorder: Recorder,
        folder: Path,
        spans_nodes: bool,
    ) -> None:
        self.run, self.parallel, self.world, self.recorder = run, parallel, parallel.world, recorder
        self.optimizer, self._folder = optimizer, folder
        self.clock = Clock(self.world.device)
        self.split = StepSplit(self.clock)
        self.timeline: Timeline | None = None
        if run.plan.pp > 1:
            self.timeline = Timeline(
                self.clock,
                stages=run.plan.stages,
                rank=self.world.rank,
                size=self.world.size,
                shared_clock=not spans_nodes,
                flushes=run.plan.schedule != "pipedream",
            )
        self._waits: Waits | None = None
        if self.world.size > 1:
            self._waits = Waits(self._timed, self.world.device)
            self._waits.install()
        self._watch_last_gradient()
        self._steps = 0
        self._wanted: str | None = None
        self._wants_timeline = False
        self._bytes: dict[str, float] = {}

    def close(self) -> None:
        if self._waits is not None:
            self._waits.remove()

    @property
    def speaks(self) -> bool:
        """One rank of each pipeline place tells of the pipeline and is profiled."""
        return all(self.world.axis(name).rank == 0 for name in ("dp", "cp", "tp"))

    def want(self, action: str) -> None:
        """One of ACTIONS, for the next step; a profile comes with the pipeline's timeline."""
        self._wanted, self._wants_timeline = action, action == "profile"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`, all of it. Raises OSError where a profile cannot be written."""
        self._steps += 1
        counting = self._steps == _BYTES_AT and self.world.size > 1
        if self.timeline is not None:
            every = self.run.train.log_every * _TIMELINES_EVERY
            self._wants_timeline |= self._steps == _TIMELINE_AT or number % every == 0
        wanted, self._wanted = self._wanted, None
        with self._profile(wanted, number) if wanted and self.speaks else nullcontext():
            if not counting:
                yield
            else:
                # with DTensors, which take a second to load
                from workers.training.trace.traffic import CountBytes

                with CountBytes() as counted:
                    yield
                self._bytes = counted.values()

    def moments(self) -> Moments | None:
        """This rank's in the step's pipeline: some for its sums, and all where its timeline is due."""
        if self.timeline is None:
            return None
        wanted, self._wants_timeline = self._wants_timeline, False
        actions = self.timeline.actions() if wanted and self.speaks else []
        return Moments(self.timeline.row(self.world.device), actions)

    def summed(
        self, number: int, rows: list[float] | None, moments: Moments | None
    ) -> dict[str, float]:
        """The step's sums are back: what they say of the pipeline, and the timeline where it is
        due.
        """
        self.split.settle()
        if self.timeline is None or rows is None or moments is None:
            return {}
        found = self.timeline.bubble(rows)
        if found is not None and moments.actions:
            self._tell_timeline(number, *found, self.timeline.drawn(moments.actions, found[0]))
        self.timeline.left()
        self.clock.anchor()
        return {} if found is None else {"pipeline/bubble_fraction": found[2]}

    def values(self) -> dict[str, float]:
        """Of the steps since the last call."""
        return self.split.values() | self._bytes

    def action(self, kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        assert self.timeline is not None
        return self.timeline.action(kind, stage, micro_batch)

    def _timed(self, wait: Callable[[], Any]) -> Any:
        if self.split.part is None:
            return wait()
        before, start = self.split.enter("exposed"), self.clock.now()
        try:
            return wait()
        finally:
            self.split.enter(before)
            if self.timeline is not None:
                self.timeline.waited(start, self.clock.now())

    def _watch_last_gradient(self) -> None:
        """DDP waits in C++: from the gradient that is made last, the model's first parameter's, it
        is what is left.
        """
        for module in self.parallel.modules:
            if isinstance(module, DDP):
                watched: Any = next(each for each in module.parameters() if each.requires_grad)
                watched.register_post_accumulate_grad_hook(
                    lambda _, ddp=module: self._last_gradient(ddp)
                )

    def _last_gradient(self, ddp: DDP) -> None:
        if ddp.require_backward_grad_sync and self.split.part == "backward":
            self.split.enter("exposed")

    def _tell_timeline(
        self, number: int, zero: float, span_s: float, bubble: float, rows: list[list[Any]]
    ) -> None:
        assert self.timeline is not None
        began_s = time.time() - (time.perf_counter() - self.timeline.seconds(zero))
        place = self.world.axis("pp").rank
        self.recorder.event(
            "pipeline_timeline",
            step=number,
            stages=stages_on_rank(self.run.plan, place),
            pp_rank=place,
            schedule=self.run.plan.schedule,
            began_s=began_s,
            span_s=span_s,
            actions=rows,
            bubble_fraction=bubble,
        )

    def _profile(self, action: str, number: int) -> AbstractContextManager[None]:
        device = self.world.device
        if action == "profile":
            path = self._folder / f"profile-step-{number}.json.gz"
            return profiled(path, self._teller("profile_saved", number))
        tell = self._teller("memory_profile", number)
        if device.type == "cuda":
            return memory_recorded(
                self._folder / f"memory-step-{number}.pickle", tell, device=device
            )
        path = self._folder / f"memory-step-{number}.json"
        whole = self.run.plan.pp == 1 or self.run.plan.schedule not in SPLIT_BACKWARD
        return memory_tracked(
            path, tell, parts=self.parallel.parts, optimizer=self.optimizer, by_module=whole
        )

    def _teller(self, event: str, number: int) -> Callable[[Path, dict[str, Any]], None]:
        def tell(path: Path, more: dict[str, Any]) -> None:
            size = path.stat().st_size
            self.recorder.event(
                event, step=number, path=str(path), name=path.name, bytes=size, **more
            )

        return tell
