"""The training loop: batches in, updates, numbers out; validation, checkpoints and requests at step
boundaries.

Knows the order of things; how each is done stands in the module of its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from workers.metrics.beacon import Beacon
from workers.metrics.kernel_choices import EVENT as KERNELS
from workers.metrics.kernel_choices import kernels_chosen
from workers.metrics.recorder import Recorder
from workers.metrics.throughput import Throughput
from workers.models.moe.balance_control import Balancer, routing_layers
from workers.runtime.exits import Outcome
from workers.training.checkpoint import Checkpointer, training_tensors
from workers.training.data.losses import SourceLosses
from workers.training.data.prompts import Prompts
from workers.training.data.samples import Samples
from workers.training.loop import console
from workers.training.loop.lr_schedule import lr_at
from workers.training.loop.memory_metrics import MemoryBook
from workers.training.loop.microbatches import Setting, passes_of
from workers.training.loop.objective import without_logits
from workers.training.loop.step_report import Report, Told
from workers.training.loop.text_samples import Writer
from workers.training.numerics.step_checks import Soundness
from workers.training.optim import Following, build_optimizer, fill_state, set_lr, update
from workers.training.parallel.arrival_skew import Arrivals
from workers.training.parallel.mesh import World
from workers.training.parallel.parallelize import Parallel
from workers.training.setup.control import Control, strongest
from workers.training.setup.resume import Start, manifest_of
from workers.training.setup.spec_loading import TrainingRun
from workers.training.trace.step_trace import ACTIONS as WATCHED
from workers.training.trace.step_trace import Trace


class Loop:
    """One attempt's training on this rank.

    `step` is the last finished step, `phase` what it is doing, for reports.
    """

    leaves_together = True  # ranks leave a step at the same time

    def __init__(
        self,
        run: TrainingRun,
        world: World,
        parallel: Parallel,
        *,
        train: Samples,
        held_out: Samples | None,
        recorder: Recorder,
        control: Control,
        checkpointer: Checkpointer,
        throughput: Throughput,
        memory: MemoryBook,
        scratch: Path,
        beacon: Beacon,
        trace: Trace,
        node: str | None,
        prompts: Prompts | None = None,
    ) -> None:
        """With `prompts` texts are written at checkpoints and at the end.

        `node`: where this rank is, of several.
        """
        self.run, self.world, self.parallel = run, world, parallel
        self.train, self.held_out = train, held_out
        self.recorder, self.control, self.checkpointer = recorder, control, checkpointer
        self.throughput, self.memory, self.beacon, self.trace = throughput, memory, beacon, trace
        self.parameters = parallel.parameters()
        data = world.axis("data")
        self.optimizer = build_optimizer(
            self.parameters,
            run.train.optimizer,
            split_state=run.plan.zero == 1 and data.size > 1,
            among=lambda parameter: parallel.copies(parameter).group,
            offload=run.plan.offload,
            scratch=scratch,
            fused=run.train.fused_kernels,
        )
        trace.optimizer = self.optimizer
        if isinstance(self.optimizer, Following):
            parallel.follow = self.optimizer.follow
        self.balancer: Balancer | None = None
        if run.model.moe:
            self.balancer = Balancer(routing_layers(parallel.parts, run.model), run.model.moe)
        self.soundness = Soundness(run, parallel, self.parameters, recorder)
        by_source = SourceLosses(train, world.device) if len(train.names) > 1 else None
        setting = Setting(run, world, parallel, train, memory, by_source, self._tell, trace)
        setting.without_logits = run.train.fused_kernels and without_logits(run.plan, world.device)
        self.passes = passes_of(setting)
        self.arrivals = Arrivals(
            rank=world.rank, size=world.size, stages=run.plan.pp, device=world.device
        )
        if run.plan.zero < 2:
            self.arrivals.watch(self.parameters.values())
        self.report = Report(
            setting,
            balancer=self.balancer,
            soundness=self.soundness,
            arrivals=self.arrivals if self.leaves_together else None,
            throughput=throughput,
            recorder=recorder,
            node=node,
        )
        self.writer: Writer | None = None
        if prompts is not None and prompts.ids and run.train.writes is not None:
            self.writer = Writer(
                run,
                run.train.writes,
                prompts,
                parallel=parallel,
                passes=self.passes,
                recorder=recorder,
                tell=self._tell,
            )
        self.step = self.tokens = self.samples = 0
        self.phase = "starting"
        self._has_state = False

    def go(self, start: Start) -> Outcome:
        """Train from `start` to the last step, or until asked to leave.

        Raises NumericsError when numbers end.
        """
        self.step, self.tokens, self.samples = start.step, start.tokens, start.samples
        self._has_state = start.folder is not None
        self.soundness.restore(start.loss_scale)
        steps, checkpoint = self.run.train.steps, self.run.train.checkpoint
        console.started(
            model=self.run.model.name,
            first=self.step,
            steps=steps,
            tokens_per_step=self.run.tokens_per_step,
            ranks=self.world.size,
        )
        while self.step < steps:
            with self.trace.step(self.step + 1), self._compiling():
                asked = self._one_step()
            if self.step == start.step + 1 and self.world.rank == 0:
                self.recorder.event(
                    KERNELS, **kernels_chosen(self.world.device, fused=self.run.train.fused_kernels)
                )
            leaving = asked in ("stop", "pause", "preempt")
            due = checkpoint is not None and (
                self.step % checkpoint.every_steps == 0 or self.step == steps
            )
            saves = asked in ("pause", "preempt", "checkpoint") or (due and asked != "stop")
            if saves:
                self._save(wait=leaving)
            if self.writer and not leaving and (saves or self.step == steps):
                self.writer.write(self.step)
            if asked in WATCHED:
                self.trace.want(asked)
            if asked is not None:
                self.control.mark_done()
            if leaving and self.step < steps:
                self._finish_saving()
                self.recorder.event(
                    "preempted" if asked != "stop" else "stopped", action=asked, step=self.step
                )
                kind = "cancelled" if asked == "stop" else "preempted"
                return self._left(
                    Outcome(kind, f"{asked} was asked for, left after step {self.step}", self.step)
                )
        self._finish_saving()
        return self._left(Outcome("ok", f"all {steps} steps done", self.step))

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Around a step: what torch compiles in it is a phase, and told afterwards."""
        if not self.run.train.compile:
            yield
            return
        from workers.training.setup.compile import Compilation

        with Compilation(lambda: self.phase, self._enter) as compilation:
            yield
        taken = compilation.taken
        if taken is not None and self.trace.speaks:
            self.recorder.event("compiled", step=self.step, **taken)

    def _enter(self, phase: str) -> None:
        self.phase = phase

    def _finish_saving(self) -> None:
        """Wait for what is written beside training: a phase that no earlier one tells how long it
        may take.
        """
        self.phase = "finishing"
        self.checkpointer.finish()

    def _left(self, outcome: Outcome) -> Outcome:
        console.ended(outcome.reason)
        return outcome

    def _one_step(self) -> str | None:
        """One update and its point; returns the action that any rank was asked for."""
        number = self.step + 1
        self.trace.split.enter("other")
        asked = self.control.poll()
        loss_sum, data_s = self._gradients()
        self.phase = "update"
        gradients = self._found_gradients()
        told = self._send(
            number, loss_sum=loss_sum, gradients=gradients, asked=asked, data_s=data_s
        )
        values, sums = self.report.read(told)
        norm = values["grad_norm"]
        if math.isfinite(values["loss"]) and math.isfinite(norm):
            set_lr(self.optimizer, values["lr"])
            limit, scale = self.run.train.clip_norm, self.soundness.scale
            update(self.optimizer, gradients, norm=norm, limit=limit, scale=scale)
            self.parallel.finish_update()
            self.memory.count_state(gradients, self.optimizer)
            self._has_state = True
            if self.balancer:
                self.balancer.update(sums["balance"])
            self.soundness.updated(number)
        elif not self.soundness.skip(number, values["loss"]):
            self._end(number, values)
        self.optimizer.zero_grad(set_to_none=True)
        self.step = number
        self._after_step(number, self.tokens, values)
        return strongest(sums["asked"])

    def _send(
        self,
        number: int,
        *,
        loss_sum: Tensor,
        gradients: list[Tensor],
        asked: list[float],
        data_s: float,
    ) -> Told:
        """Tell the other ranks of step `number`, whose samples are used up by that."""
        train, first = self.run.train, self.samples
        lr = lr_at(number, steps=train.steps, peak=train.optimizer.lr, schedule=train.lr_schedule)
        self.samples += self.run.plan.global_batch_size
        self.tokens += self.run.tokens_per_step
        return self.report.send(
            number,
            first=first,
            tokens=self.tokens,
            loss_sum=loss_sum,
            gradients=gradients,
            asked=asked,
            values={"lr": lr, "data_time_s": data_s},
        )

    def _found_gradients(self) -> list[Tensor]:
        """The step's gradients in the parameters' order. Raises RuntimeError where one is missing:
        some combination of
        techniques lost it, and the update would silently leave its weights behind."""
        gradients = [each.grad for each in self.parameters.values()]
        missing = [
            name
            for name, gradient in zip(self.parameters, gradients, strict=True)
            if gradient is None
        ]
        if missing:
            raise RuntimeError(
                f"the backward pass left {len(missing)} parameters without gradient: {missing[:4]}"
            )
        return [gradient for gradient in gradients if gradient is not None]

    def _gradients(self) -> tuple[Tensor, float]:
        """Forward and backward over this rank's micro-batches: its share of the summed token loss,
        seconds of data.
        """
        for module in self.parallel.modules:
            module.train()
        factor = self.soundness.factor
        # a mean over all sequences, likewise, to which each tensor-parallel rank adds its part
        if self.balancer:
            self.balancer.scale_gradients(factor * self.run.train.seq_len / self.run.plan.tp)
        return self.passes.gradients(self.samples, factor)

    def _after_step(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """The point of a step that gets one, `tokens` being those until then."""
        train = self.run.train
        self.trace.split.enter(None)
        if not train.logs(step):
            return
        if train.validates(step):
            self.phase = "validation"
            values["val_loss"] = self.validate()
            values["val_perplexity"] = math.exp(min(values["val_loss"], 700.0))
        values |= self.throughput.values() | self.memory.values() | self.trace.values()
        self.phase = "record"
        self.recorder.point(step=step, tokens=tokens, values=values)
        console.stepped(step, train.steps, values)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean token loss over the first `eval.batches` global batches of held-out text, in order,
        dropout off.

        The same samples under any number of ranks.
        """
        spec, samples = self.run.train.eval, self.held_out
        assert spec is not None and samples is not None
        count = min(spec.batches * self.run.plan.global_batch_size, samples.windows)
        for module in self.parallel.modules:
            module.eval()
        total = self.passes.evaluate(samples, count)
        for module in self.parallel.modules:
            module.train()
        loss, tokens = self.world.sum_(total).tolist()
        return float(loss / tokens)

    def _tell(self, phase: str) -> None:
        self.phase = phase
        if phase == "forward":
            self.arrivals.begin()

    @property
    def phase(self) -> str:
        """What this rank is doing; each setting is a sign of progress."""
        return self.beacon.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.beacon.mark(phase, step=self.step)
        self.trace.split.phase(phase)

    def _save(self, *, wait: bool) -> None:
        self.phase = "checkpoint"
        manifest = manifest_of(
            self.run,
            step=self.step,
            tokens=self.tokens,
            samples=self.samples,
            world_size=self.world.size,
            loss_scale=self.soundness.state,
        )
        if not self._has_state:  # every update so far was skipped
            fill_state(self.optimizer, self.parameters.values())
            self._has_state = True
        tensors = training_tensors(self.parallel.weights(), self.optimizer)
        # beside training, a copy of all states would be held in memory: the very thing that states
        # on disk avoid
        wait = wait or self.run.plan.offload == "nvme"
        self.checkpointer.save(tensors, step=self.step, manifest=manifest, wait=wait)

    def _end(self, number: int, values: dict[str, float]) -> NoReturn:
        """The update is not made: the last checkpoint's weights, and these, are still sound."""
        spoiled = self.soundness.spoiled()
        self.recorder.point(step=number, tokens=self.tokens, values=values)
        self.phase = "locating"
        self.optimizer.zero_grad(set_to_none=True)
        # the step once more, to see where it begins
        self.samples -= self.run.plan.global_batch_size
        raise self.soundness.ended(number, values, spoiled=spoiled, again=self._gradients)
