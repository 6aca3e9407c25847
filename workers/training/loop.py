"""The training loop: batches in, updates, numbers out; validation, checkpoints and requests at step boundaries.

Knows the order of things; how each is done stands in the module of its name.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from workers.contracts.plan import LossScale
from workers.metrics.memory import local_tensor
from workers.metrics.recorder import Recorder
from workers.metrics.throughput import Throughput
from workers.models.balancer import Balancer, routing_layers
from workers.training import narrate
from workers.training.accept import TrainingRun
from workers.training.arrival import Arrivals
from workers.training.beacon import Beacon
from workers.training.checkpoint import Checkpointer, training_tensors
from workers.training.control import Control, strongest
from workers.training.data.losses import SourceLosses
from workers.training.data.samples import Samples
from workers.training.exits import NumericsError, Outcome
from workers.training.locate import locate
from workers.training.loss_scale import Change, LossScaler
from workers.training.memory import MemoryBook
from workers.training.mesh import World
from workers.training.optim import build_optimizer, fill_state, scale_, set_lr, squared_norm
from workers.training.parallelize import Parallel
from workers.training.passes import Setting, passes_of
from workers.training.resume import Start, manifest_of
from workers.training.schedule import lr_at
from workers.training.sums import Sums
from workers.training.trace.watch import ACTIONS as WATCHED
from workers.training.trace.watch import Trace
from workers.training.underflow import shares, zeros_by_layer


class Loop:
    """One attempt's training on this rank. `step` is the last finished step, `phase` what it is doing, for reports."""

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
        spans_nodes: bool,
    ) -> None:
        self.run, self.world, self.parallel = run, world, parallel
        self.train, self.held_out = train, held_out
        self.recorder, self.control, self.checkpointer = recorder, control, checkpointer
        self.throughput, self.memory, self.beacon, self.trace = throughput, memory, beacon, trace
        self.spans_nodes = spans_nodes
        self.parameters = parallel.parameters()
        self.holders = [parallel.holders(name, each) for name, each in self.parameters.items()]
        data = world.axis("data")
        self.optimizer = build_optimizer(
            self.parameters,
            run.train.optimizer,
            split_state=run.plan.zero == 1 and data.size > 1,
            among=lambda parameter: parallel.copies(parameter).group,
            offload=run.plan.offload,
            scratch=scratch,
        )
        trace.optimizer = self.optimizer
        self.balancer: Balancer | None = None
        if run.model.moe:
            self.balancer = Balancer(routing_layers(parallel.parts, run.model), run.model.moe)
        self.scaler = LossScaler(run.plan.loss_scale or LossScale()) if run.plan.precision == "fp16" else None
        self.by_source = SourceLosses(train, world.device) if len(train.names) > 1 else None
        setting = Setting(run, world, parallel, train, memory, self.by_source, self._tell, trace)
        self.passes = passes_of(setting)
        self.arrivals = Arrivals(rank=world.rank, size=world.size, stages=run.plan.pp, device=world.device)
        if run.plan.zero < 2:
            self.arrivals.watch(self.parameters.values())
        self.step = self.tokens = self.samples = 0
        self.phase = "starting"
        self._has_state = self._loss_was_lost = False

    def go(self, start: Start) -> Outcome:
        """Train from `start` to the last step, or until asked to leave. Raises NumericsError when numbers end."""
        self.step, self.tokens, self.samples = start.step, start.tokens, start.samples
        self._has_state = start.folder is not None
        if self.scaler and start.loss_scale:
            self.scaler = LossScaler(self.scaler.spec, start.loss_scale)
        steps, checkpoint = self.run.train.steps, self.run.train.checkpoint
        narrate.started(
            model=self.run.model.name,
            first=self.step,
            steps=steps,
            tokens_per_step=self.run.tokens_per_step,
            ranks=self.world.size,
        )
        while self.step < steps:
            with self.trace.step(self.step + 1):
                asked = self._one_step()
            leaving = asked in ("stop", "pause", "preempt")
            due = checkpoint is not None and (self.step % checkpoint.every_steps == 0 or self.step == steps)
            if asked in ("pause", "preempt", "checkpoint") or (due and asked != "stop"):
                self._save(wait=leaving)
            if asked in WATCHED:
                self.trace.want(asked)
            if asked is not None:
                self.control.acted()
            if leaving and self.step < steps:
                self.checkpointer.finish()
                self.recorder.event("preempted" if asked != "stop" else "stopped", action=asked, step=self.step)
                kind = "cancelled" if asked == "stop" else "preempted"
                return self._left(Outcome(kind, f"{asked} was asked for, left after step {self.step}", self.step))
        self.checkpointer.finish()
        return self._left(Outcome("ok", f"all {steps} steps done", self.step))

    def _left(self, outcome: Outcome) -> Outcome:
        narrate.ended(outcome.reason)
        return outcome

    def _one_step(self) -> str | None:
        """One update and its point; returns the action that any rank was asked for."""
        train, number = self.run.train, self.step + 1
        self.trace.split.enter("other")
        asked = self.control.poll()
        loss_sum, data_s = self._gradients()
        self.phase = "update"
        gradients = self._found_gradients()
        share = squared_norm(gradients, self.holders)
        # the only collective of a step besides the gradients' own: loss, norm, duration and requests travel together
        told = Sums(self.world)
        told.put("loss", loss_sum)
        told.put("norm", share)
        told.put("asked", asked)
        told.put("arrivals", self.arrivals.told())
        if self.by_source:
            told.put("by_source", self.by_source.take() / self.run.plan.tp)
        if self.scaler and self._logs(number):
            told.put("underflow", zeros_by_layer(self.parameters, self.run.model.layers))
        if self.balancer:
            told.put("balance", self.balancer.take(self.world.device) / self.run.plan.tp)
        if (moments := self.trace.moments()) is not None:
            told.put("pipeline", moments.row)
        told.put("seconds", self.trace.split.cut())
        sums = told.total()
        pipeline = self.trace.summed(number, sums.get("pipeline"), moments)
        # what `_backward_factor` put into fp16 gradients beyond the mean over all tokens
        scale = self.scaler.scale / self.parallel.averaged if self.scaler else 1.0
        [loss_sum_all], [square] = sums["loss"], sums["norm"]
        loss, norm = loss_sum_all / self.run.tokens_per_step, math.sqrt(square) / scale if square >= 0 else math.nan
        lr = lr_at(number, steps=train.steps, peak=train.optimizer.lr, schedule=train.lr_schedule)
        first = self.samples
        self.samples += self.run.plan.global_batch_size
        self.tokens += self.run.tokens_per_step
        self.throughput.step(seconds=sums["seconds"][0] / self.world.size, tokens=self.run.tokens_per_step)
        values = {"loss": loss, "grad_norm": norm, "lr": lr, "data_time_s": data_s, **pipeline}
        values |= self._arrived(sums["arrivals"])
        if self.by_source:
            values |= self.by_source.values(sums["by_source"], first=first, count=self.run.plan.global_batch_size)
        if self.scaler:
            values |= {"loss_scale": self.scaler.scale, **shares(sums.get("underflow", []))}
        if self.balancer:
            values |= self.balancer.values(sums["balance"], sequences=self.run.plan.global_batch_size)
        if math.isfinite(loss) and math.isfinite(norm):
            scale_(gradients, norm=norm, limit=train.clip_norm, loss_scale=scale)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
            self.parallel.finish_update()
            self.memory.count_state(gradients, self.optimizer)
            self._has_state, self._loss_was_lost = True, False
            if self.balancer:
                self.balancer.update(sums["balance"])
            if self.scaler:
                self._tell_scale(number, self.scaler.updated())
        else:
            self._skip(number, values)
        self.optimizer.zero_grad(set_to_none=True)
        self.step = number
        self._after_step(number, self.tokens, values)
        return strongest(sums["asked"])

    def _found_gradients(self) -> list[Tensor]:
        """The step's gradients in the parameters' order. Raises RuntimeError where one is missing: some combination of
        techniques lost it, and the update would silently leave its weights behind."""
        gradients = [each.grad for each in self.parameters.values()]
        missing = [name for name, gradient in zip(self.parameters, gradients, strict=True) if gradient is None]
        if missing:
            raise RuntimeError(f"the backward pass left {len(missing)} parameters without gradient: {missing[:4]}")
        return [gradient for gradient in gradients if gradient is not None]

    def _gradients(self) -> tuple[Tensor, float]:
        """Forward and backward over this rank's micro-batches: its share of the summed token loss, seconds of data."""
        for module in self.parallel.modules:
            module.train()
        factor = self._backward_factor()
        if self.balancer:  # a mean over all sequences, likewise, to which each tensor-parallel rank adds its part
            self.balancer.scale_gradients(factor * self.run.train.seq_len / self.run.plan.tp)
        return self.passes.gradients(self.samples, factor)

    def _backward_factor(self) -> float:
        """Of the summed token loss. Gradient reductions average over ranks, and a mean over all tokens is wanted.

        fp16 gradients are of one size under any number of ranks instead, so that they overflow under all or none; the
        update multiplies by it.
        """
        if self.scaler:
            return self.scaler.scale / self.run.tokens_per_step
        return self.parallel.averaged / self.run.tokens_per_step

    def _after_step(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """The point of a step that gets one, `tokens` being those until then."""
        train = self.run.train
        self.trace.split.enter(None)
        if not self._logs(step):
            return
        if self._validates(step):
            self.phase = "validation"
            values["val_loss"] = self.validate()
            values["val_perplexity"] = math.exp(min(values["val_loss"], 700.0))
        values |= self.throughput.values() | self.memory.values() | self.trace.values()
        self.phase = "record"
        self.recorder.point(step=step, tokens=tokens, values=values)
        narrate.stepped(step, train.steps, values)

    def _validates(self, step: int) -> bool:
        return self.run.train.eval is not None and step % self.run.train.eval.every_steps == 0

    def _logs(self, step: int) -> bool:
        """Whether the step gets a point."""
        train = self.run.train
        return self._validates(step) or step % train.log_every == 0 or step == train.steps

    @torch.no_grad()
    def validate(self) -> float:
        """Mean token loss over the first `eval.batches` global batches of held-out text, in order, dropout off.

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

    def _arrived(self, seconds: list[float]) -> dict[str, float]:
        late_s = self.arrivals.left(seconds)
        # a node's supervisor sees its own ranks' every collective; over several nodes this is what there is
        if self.world.rank == 0 and self.spans_nodes and (found := self.arrivals.straggler()):
            self.recorder.event("straggler", step=self.step + 1, **found)
        return {"comm/arrival_skew_s": late_s} if self.world.size > 1 else {}

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
            loss_scale=self.scaler.state if self.scaler else None,
        )
        if not self._has_state:  # every update so far was skipped
            fill_state(self.optimizer, self.parameters.values())
            self._has_state = True
        tensors = training_tensors(self.parallel.weights(), self.optimizer)
        # beside training, a copy of all states would be held in memory: the very thing that states on disk avoid
        wait = wait or self.run.plan.offload == "nvme"
        self.checkpointer.save(tensors, step=self.step, manifest=manifest, wait=wait)

    def _skip(self, number: int, values: dict[str, float]) -> None:
        """No update: an overflow of fp16 gradients, of which every rank knows by the norm; the scale backs off.

        Ends where no smaller scale helps: without scaling, at the smallest scale, or when the loss itself is lost in
        two steps running, since scaling begins after the loss.
        """
        scaler, lost = self.scaler, not math.isfinite(values["loss"])
        if scaler is None or scaler.exhausted or (lost and self._loss_was_lost):
            self._stop_on_non_finite(number, values)
        else:
            self._loss_was_lost = lost
            bad = self._non_finite()
            found = torch.zeros(self.world.size, dtype=torch.float64, device=self.world.device)
            found[self.world.rank] = float(bool(bad))
            ranks = [rank for rank, count in enumerate(self.world.sum_(found).tolist()) if count]
            if self.world.rank == 0:
                told = {"loss_scale": scaler.scale, "ranks": ranks, "parameters": bad[:8]}
                self.recorder.event("overflow_skipped_step", step=number, **told)
            self._tell_scale(number, scaler.overflowed(), ranks=ranks)

    def _tell_scale(self, number: int, change: Change | None, **more: list[int]) -> None:
        if change is not None and change.old != change.new and self.world.rank == 0:
            told = {"old": change.old, "new": change.new, "reason": change.reason}
            self.recorder.event("loss_scale_changed", step=number, **told, **more)

    def _non_finite(self) -> list[str]:
        """Parameters of which this rank holds a gradient that is not finite."""
        return [name for name, p in self.parameters.items() if p.grad is not None and not _all_finite(p.grad)]

    def _stop_on_non_finite(self, number: int, values: dict[str, float]) -> None:
        """The update is not made: the last checkpoint's weights, and these, are still sound."""
        bad = self._non_finite()
        self.recorder.point(step=number, tokens=self.tokens, values=values)
        self.phase = "locating"
        self.optimizer.zero_grad(set_to_none=True)
        self.samples -= self.run.plan.global_batch_size  # the step once more, to see where it begins
        culprit = locate(self.parallel.parts, self.world, self._gradients)
        what = "loss" if not math.isfinite(values["loss"]) else "gradient norm"
        where = f", first in the {culprit.what} of {culprit.module} (rank {culprit.rank})" if culprit else ""
        told = {"what": what + where, "module": culprit.module if culprit else None}
        self.recorder.event(
            "non_finite", step=number, **values, **told, parameters=bad[:8], parameters_affected=len(bad)
        )
        where = where or ", but was when the step was done again, which points to the device"
        numbers = f"loss {values['loss']}, grad_norm {values['grad_norm']}"
        raise NumericsError(
            f"the {what} is not finite at step {number} ({numbers}){where}; "
            f"try a lower learning rate, clip_norm 1.0, warm-up, or {'bf16' if self.scaler else 'fp32'}"
        )


def _all_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(gradient)).all())
