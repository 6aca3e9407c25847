"""The training loop: batches in, updates, numbers out; validation, checkpoints and requests at step boundaries.

Knows the order of things; how each is done stands in the module of its name.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import functional

from workers.contracts.plan import LossScale
from workers.metrics.memory import SavedForBackward, held_bytes, local_tensor, storage_keys
from workers.metrics.recorder import Recorder
from workers.metrics.throughput import Throughput
from workers.models.balance import Balancer
from workers.models.initialise import derived_seed
from workers.training import narrate
from workers.training.accept import TrainingRun
from workers.training.batches import IGNORED, Block, blocks_of, tensors_of
from workers.training.checkpoint import Checkpointer, training_tensors
from workers.training.control import ACTIONS, Control, strongest
from workers.training.data.losses import SourceLosses
from workers.training.data.samples import Samples
from workers.training.exits import NumericsError, Outcome
from workers.training.loss_scale import Change, LossScaler
from workers.training.memory import MemoryBook
from workers.training.mesh import World
from workers.training.optim import build_optimizer, fill_state, scale_, set_lr, squared_norm
from workers.training.parallelize import Parallel
from workers.training.precision import products
from workers.training.resume import Start, manifest_of
from workers.training.schedule import lr_at
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
    ) -> None:
        self.run, self.world, self.parallel = run, world, parallel
        self.train, self.held_out = train, held_out
        self.recorder, self.control, self.checkpointer = recorder, control, checkpointer
        self.throughput, self.memory = throughput, memory
        self.parameters = parallel.parameters()
        self.optimizer = build_optimizer(
            self.parameters, run.train.optimizer, split_state=run.plan.zero == 1 and world.size > 1
        )
        self.balancer = Balancer(parallel.decoder, run.model.moe) if run.model.moe else None
        self.scaler = LossScaler(run.plan.loss_scale or LossScale()) if run.plan.precision == "fp16" else None
        self.by_source = SourceLosses(train, world.device) if len(train.names) > 1 else None
        self.step = self.tokens = self.samples = 0
        self.phase = "starting"
        self._tail_s = 0.0
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
            asked = self._one_step()
            leaving = asked in ("stop", "pause", "preempt")
            due = checkpoint is not None and (self.step % checkpoint.every_steps == 0 or self.step == steps)
            if asked in ("pause", "preempt", "checkpoint") or (due and asked != "stop"):
                self._save(wait=leaving)
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
        started = time.perf_counter()
        asked = self.control.poll()
        loss_sum, data_s = self._gradients()
        self.phase = "update"
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        share = squared_norm(gradients, replicas=self.parallel.replicas)
        head_s = time.perf_counter() - started + self._tail_s
        # the only collective of a step besides the gradients' own: loss, norm, duration and requests travel together
        told = [torch.tensor([head_s, *asked], dtype=torch.float64, device=self.world.device)]
        if self.by_source:
            told.append(self.by_source.take())
        if self.scaler and self._logs(number):
            told.append(zeros_by_layer(self.parameters, self.run.model.layers))
        if self.balancer:
            told.append(self.balancer.take(self.world.device))
        sums = self.world.sum_(torch.cat([torch.stack([loss_sum.double(), share]), *told])).tolist()
        tail_started = time.perf_counter()
        routed = self.balancer.told if self.balancer else 0
        # what `_backward_factor` put into fp16 gradients beyond the mean over all tokens
        scale = self.scaler.scale / self.run.plan.dp if self.scaler else 1.0
        loss, norm = sums[0] / self.run.tokens_per_step, math.sqrt(sums[1]) / scale if sums[1] >= 0 else math.nan
        lr = lr_at(number, steps=train.steps, peak=train.optimizer.lr, schedule=train.lr_schedule)
        first = self.samples
        self.samples += self.run.plan.global_batch_size
        self.tokens += self.run.tokens_per_step
        self.throughput.step(seconds=sums[2] / self.world.size, tokens=self.run.tokens_per_step)
        values = {"loss": loss, "grad_norm": norm, "lr": lr, "data_time_s": data_s}
        rest = 3 + len(ACTIONS)
        if self.by_source:
            told_by_source = sums[rest : rest + self.by_source.width]
            values |= self.by_source.values(told_by_source, first=first, count=self.run.plan.global_batch_size)
            rest += self.by_source.width
        if self.scaler:
            values |= {"loss_scale": self.scaler.scale, **shares(sums[rest : len(sums) - routed])}
        if self.balancer:
            values |= self.balancer.values(sums[-routed:], sequences=self.run.plan.global_batch_size)
        if math.isfinite(loss) and math.isfinite(norm):
            scale_(gradients, norm=norm, limit=train.clip_norm, loss_scale=scale)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
            self.memory.count_state(gradients, self.optimizer)
            self._has_state, self._loss_was_lost = True, False
            if self.balancer:
                self.balancer.update(sums[-routed:])
            if self.scaler:
                self._tell_scale(number, self.scaler.updated())
        else:
            self._skip(number, values)
        self.optimizer.zero_grad(set_to_none=True)
        self.step = number
        self._tail_s = time.perf_counter() - tail_started
        self._after_step(values)
        return strongest(sums[3 : 3 + len(ACTIONS)])

    def _gradients(self) -> tuple[Tensor, float]:
        """Forward and backward over this rank's micro-batches: summed token losses, seconds spent on data."""
        plan, world = self.run.plan, self.world
        blocks = blocks_of(
            self.samples, plan.global_batch_size, micro_batch_size=plan.micro_batch_size, dp=plan.dp, rank=world.rank
        )
        self.parallel.module.train()
        factor = self._backward_factor()
        if self.balancer:  # a mean over all sequences, likewise
            self.balancer.scale_gradients(factor * self.run.train.seq_len)
        total = torch.zeros((), device=world.device)
        data_s = 0.0
        for index, block in enumerate(blocks):
            started = time.perf_counter()
            inputs, targets = tensors_of(self.train, block, world.device)
            data_s += time.perf_counter() - started
            with ExitStack() as stack:
                stack.enter_context(products(plan.precision, world.device))
                if index + 1 < len(blocks):
                    stack.enter_context(self.parallel.accumulating())
                self.phase = "forward"
                loss = self._forward_watched(block, inputs, targets)
                self.phase = "backward"
                torch.autograd.backward(loss * factor)
            total += loss.detach()
        return total, data_s

    def _backward_factor(self) -> float:
        """Of the summed token loss. Data-parallel reductions average over dp, and a mean over all tokens is wanted.

        fp16 gradients are of one size under any dp instead, so that they overflow under all or none; the update
        multiplies by dp.
        """
        if self.scaler:
            return self.scaler.scale / self.run.tokens_per_step
        return self.run.plan.dp / self.run.tokens_per_step

    def _forward_watched(self, block: Block, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed token loss of a micro-batch; the attempt's first also counts what is kept for the backward pass."""
        if self.run.model.dropout:
            # by sample, not by rank or restart: the same masks under any number of ranks and after a resume
            torch.manual_seed(derived_seed(self.run.train.seed, "dropout", block.first))
        if self.by_source:
            self.by_source.expect(block)
        if self.memory.counted:
            return self._loss(inputs, targets)
        if self.parallel.casts:
            self.parallel.casts.watch = True
        with SavedForBackward() as saved:
            loss = self._loss(inputs, targets)
        gathered = self.parallel.gathered_weights()
        weights = storage_keys([*self.parameters.values(), *gathered])
        self.memory.count_forward(activations=saved.held(without=weights), gathered=held_bytes(gathered))
        if self.parallel.casts:
            self.parallel.casts.watch = False
            self.parallel.casts.copies.clear()
        return loss

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed token loss."""
        logits = self.parallel.module(inputs).float().flatten(0, 1)
        awaited = self.by_source is not None and self.by_source.awaits
        how = "none" if awaited else "sum"
        loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=how)
        if awaited and self.by_source:
            loss = loss.view_as(targets).sum(dim=1)
            self.by_source.add(loss)
        return loss.sum()

    def _after_step(self, values: dict[str, float]) -> None:
        train = self.run.train
        validate = self._validates(self.step)
        if not self._logs(self.step):
            return
        if validate:
            self.phase = "validation"
            values["val_loss"] = self.validate()
            values["val_perplexity"] = math.exp(min(values["val_loss"], 700.0))
        values |= self.throughput.values() | self.memory.values()
        self.phase = "record"
        self.recorder.point(step=self.step, tokens=self.tokens, values=values)
        narrate.stepped(self.step, train.steps, values)

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
        plan, spec, samples = self.run.plan, self.run.train.eval, self.held_out
        assert spec is not None and samples is not None
        count = min(spec.batches * plan.global_batch_size, samples.windows)
        module = self.parallel.module
        module.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        blocks = blocks_of(0, count, micro_batch_size=plan.micro_batch_size, dp=plan.dp, rank=self.world.rank)
        for block in blocks:
            inputs, targets = tensors_of(samples, block, self.world.device)
            with products(plan.precision, self.world.device):
                total[0] += self._loss(inputs, targets).double()
            total[1] += block.count * samples.seq_len
        module.train()
        self.parallel.release_gathered()
        loss, tokens = self.world.sum_(total).tolist()
        return float(loss / tokens)

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
        self.recorder.event("non_finite", step=number, **values, parameters=bad[:8], parameters_affected=len(bad))
        what = "loss" if not math.isfinite(values["loss"]) else "gradient norm"
        where = f", first in the gradient of {bad[0]}" if bad else ""
        numbers = f"loss {values['loss']}, grad_norm {values['grad_norm']}"
        raise NumericsError(
            f"the {what} is not finite at step {number} ({numbers}){where}; "
            f"try a lower learning rate, clip_norm 1.0, warm-up, or {'bf16' if self.scaler else 'fp32'}"
        )


def _all_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(gradient)).all())
