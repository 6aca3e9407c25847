"""The training loop's trace: time breakdown, waits, bytes, pipeline timeline, profiles on demand.

Decides when each is due; the other modules measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
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
from workers.training.trace.profiles import profile_step, record_memory, track_memory
from workers.training.trace.time_breakdown import StepTimeBreakdown
from workers.training.trace.timeline import Action, Timeline
from workers.training.trace.waits import WaitTimer

ACTIONS = ("profile", "memory_snapshot")
# steps of an attempt: by the third, DDP's buckets and all shapes are settled
_TIMELINE_STEP, _BYTE_COUNT_STEP = 2, 3
_TIMELINE_INTERVAL = 50  # logged steps


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Of one step: `row`, to be summed over ranks, and `actions` for a timeline."""

    row: Tensor
    actions: list[Action]


class Trace:
    """The trace of one attempt on one rank. `close` restores torch's functions."""

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
        self.time_breakdown = StepTimeBreakdown(self.clock)
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
        self._wait_timer: WaitTimer | None = None
        if self.world.size > 1:
            self._wait_timer = WaitTimer(self._timed, self.world.device)
            self._wait_timer.install()
        self._hook_last_gradient()
        self._steps = 0
        self._requested: str | None = None
        self._timeline_requested = False
        self._bytes: dict[str, float] = {}

    def close(self) -> None:
        """Restore torch's functions."""
        if self._wait_timer is not None:
            self._wait_timer.remove()

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its pipeline rank: the first of each dp, cp and tp axis."""
        return all(self.world.axis(name).rank == 0 for name in ("dp", "cp", "tp"))

    def request_action(self, action: str) -> None:
        """Request one of ACTIONS for the next step; a profile includes the pipeline's timeline."""
        self._requested, self._timeline_requested = action, action == "profile"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds all of step `number`. Raises OSError if a profile cannot be written."""
        self._steps += 1
        count_bytes = self._steps == _BYTE_COUNT_STEP and self.world.size > 1
        if self.timeline is not None:
            timeline_interval = self.run.train.log_every * _TIMELINE_INTERVAL
            self._timeline_requested |= (
                self._steps == _TIMELINE_STEP or number % timeline_interval == 0
            )
        requested, self._requested = self._requested, None
        with self._profile(requested, number) if requested and self.reports else nullcontext():
            if not count_bytes:
                yield
            else:
                # imports DTensor, which takes a second
                from workers.training.trace.communication_bytes import ByteCounter

                with ByteCounter() as byte_counter:
                    yield
                self._bytes = byte_counter.values()

    def pipeline_times(self) -> PipelineTimes | None:
        """This rank's times in the step's pipeline; with actions if a timeline is due."""
        if self.timeline is None:
            return None
        requested, self._timeline_requested = self._timeline_requested, False
        actions = self.timeline.actions() if requested and self.reports else []
        return PipelineTimes(self.timeline.row(self.world.device), actions)

    def pipeline_values(
        self, number: int, rows: list[float] | None, pipeline_times: PipelineTimes | None
    ) -> dict[str, float]:
        """The pipeline metrics from the step's summed rows; reports the timeline if it is due."""
        self.time_breakdown.read_oldest_step()
        if self.timeline is None or rows is None or pipeline_times is None:
            return {}
        bubble = self.timeline.bubble(rows)
        if bubble is not None and pipeline_times.actions:
            self._report_timeline(
                number, *bubble, self.timeline.event_rows(pipeline_times.actions, bubble[0])
            )
        self.timeline.sync_clock()
        self.clock.anchor()
        return {} if bubble is None else {"pipeline/bubble_fraction": bubble[2]}

    def values(self) -> dict[str, float]:
        """Means over the steps since the last call."""
        return self.time_breakdown.values() | self._bytes

    def action(self, kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Surrounds one pipeline action."""
        if self.timeline is None:
            return nullcontext()
        return self.timeline.action(kind, stage, micro_batch)

    def without_timeline(self) -> Trace:
        """This trace for passes of a second trained model: the timeline is the first one's."""
        second = copy(self)
        second.timeline = None
        return second

    def _timed(self, wait: Callable[[], Any]) -> Any:
        if self.time_breakdown.part is None:
            return wait()
        before, start = self.time_breakdown.enter("exposed"), self.clock.now()
        try:
            return wait()
        finally:
            self.time_breakdown.enter(before)
            if self.timeline is not None:
                self.timeline.add_wait(start, self.clock.now())

    def _hook_last_gradient(self) -> None:
        """Count time after the last gradient, of the model's first parameter, as exposed: DDP waits
        in C++.
        """
        for module in self.parallel.modules:
            if isinstance(module, DDP):
                watched: Any = next(each for each in module.parameters() if each.requires_grad)
                watched.register_post_accumulate_grad_hook(
                    lambda _, ddp=module: self._last_gradient(ddp)
                )

    def _last_gradient(self, ddp: DDP) -> None:
        if ddp.require_backward_grad_sync and self.time_breakdown.part == "backward":
            self.time_breakdown.enter("exposed")

    def _report_timeline(
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
            return profile_step(path, self._reporter("profile_saved", number))
        report = self._reporter("memory_profile", number)
        if device.type == "cuda":
            return record_memory(
                self._folder / f"memory-step-{number}.pickle", report, device=device
            )
        path = self._folder / f"memory-step-{number}.json"
        whole = self.run.plan.pp == 1 or self.run.plan.schedule not in SPLIT_BACKWARD
        return track_memory(
            path, report, parts=self.parallel.parts, optimizer=self.optimizer, by_module=whole
        )

    def _reporter(self, event: str, number: int) -> Callable[[Path, dict[str, Any]], None]:
        def report(path: Path, more: dict[str, Any]) -> None:
            size = path.stat().st_size
            self.recorder.event(
                event, step=number, path=str(path), name=path.name, bytes=size, **more
            )

        return report
