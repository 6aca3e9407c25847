"""The training loop: updates, metrics, validation, checkpoints and requests at step boundaries.

Decides the order only; each action is implemented in its own module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from workers.metrics.kernel_choices import EVENT as KERNELS
from workers.metrics.kernel_choices import kernels_chosen
from workers.metrics.throughput import Throughput
from workers.models.moe.balance_control import Balancer
from workers.runtime.exit_codes import Outcome
from workers.training.adapter_files import BaseWeights, adapter_writer
from workers.training.checkpoint import Checkpointer, training_tensors
from workers.training.data.rows import RowSource
from workers.training.loop import console
from workers.training.loop.lr_schedule import lr_at
from workers.training.loop.step_context import MicrobatchRunner, StepContext
from workers.training.loop.step_passes import StepPasses
from workers.training.loop.step_report import PendingReport, StepReport
from workers.training.loop.text_samples import SampleWriter
from workers.training.numerics.step_checks import StepChecks
from workers.training.objectives.counts import Counts
from workers.training.optim import fill_state, set_lr, update
from workers.training.setup.control import Control, strongest
from workers.training.setup.resume import Start, manifest_of
from workers.training.trace.step_trace import ACTIONS as TRACE_ACTIONS


class StepPreparation(Protocol):
    """What has to happen around each step, such as generating its samples."""

    def begin(self, checkpoint: Path | None) -> None:
        """Once before the first step: load what it trains itself. Collective."""
        ...

    def prepare(self, step: int, first: int) -> dict[str, float]:
        """Make the samples of `step` available, from sample `first` on. Collective.

        Returns metrics of the step's point, equal on all ranks.
        """
        ...

    def after_update(self, step: int, first: int, values: Mapping[str, float]) -> dict[str, float]:
        """Act on the update with metrics `values`, from the same samples; more metrics.
        Collective.
        """
        ...

    def finish(self, steps: int) -> None:
        """Once after the last of `steps` steps and its checkpoint.

        Raises NumericsError if something that it trains itself was never updated.
        """
        ...

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds besides the trained model. Collective."""
        ...

    def manifest(self) -> dict[str, Any]:
        """What its manifest holds besides the trained model's."""
        ...


class Loop:
    """One attempt's training on this rank. `step` is the last finished step."""

    def __init__(
        self,
        context: StepContext,
        *,
        runner: MicrobatchRunner,
        checks: StepChecks,
        report: StepReport,
        balancer: Balancer | None,
        throughput: Throughput,
        control: Control,
        checkpointer: Checkpointer,
        held_out: RowSource | None,
        writer: SampleWriter | None,
        stops: Sequence[int] = (),
        preparation: StepPreparation | None = None,
        data_fingerprint: str | None = None,
    ) -> None:
        """`writer` writes text samples at checkpoints and at the end. `stops`: tokens that end an
        answer of the model. `preparation` acts before each step. Checkpoints store
        `data_fingerprint`.
        """
        self.context, self.runner, self.checks, self.report = context, runner, checks, report
        self.run, self.world, self.parallel = context.run, context.world, context.parallel
        self.optimizer, self.memory, self.trace = context.optimizer, context.memory, context.trace
        self.recorder, self.progress = context.recorder, context.progress
        self.balancer, self.throughput, self.control = balancer, throughput, control
        self.checkpointer, self.held_out, self.writer = checkpointer, held_out, writer
        self.passes = StepPasses(context, runner, stops)
        self.preparation, self.data_fingerprint = preparation, data_fingerprint
        self.parameters = context.parallel.parameters()
        self.tokens = self.sample = 0
        self.base: BaseWeights | None = None  # of an adapter, once its weights are loaded
        self._has_state = False
        self._saved = 0  # the step of the newest checkpoint
        self.progress.enter("starting")

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.progress.step

    def run_steps(self, start: Start) -> Outcome:
        """Train from `start` to the last step, or until a request to leave.

        Raises NumericsError if the loss or gradients are not finite and cannot be recovered.
        """
        self.progress.step, self.tokens, self.sample = start.step, start.tokens, start.samples
        self._has_state = start.folder is not None
        self._saved = start.step
        self.checks.restore(start.loss_scale)
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
                request = self._one_step()
            if self.step == start.step + 1 and self.world.rank == 0:
                self.recorder.event(
                    KERNELS, **kernels_chosen(self.world.device, fused=self.run.train.fused_kernels)
                )
            leaving = request in ("stop", "pause", "preempt")
            due = checkpoint is not None and (
                self.step % checkpoint.every_steps == 0 or self.step == steps
            )
            saves = request in ("pause", "preempt", "checkpoint") or (due and request != "stop")
            if saves:
                self._save(wait=leaving)
            if self.writer and not leaving and (saves or self.step == steps):
                self.writer.write(self.step)
            if request in TRACE_ACTIONS:
                self.trace.request_action(request)
            if request is not None:
                self.control.mark_done()
            if leaving and self.step < steps:
                self._finish_saving()
                self.recorder.event(
                    "preempted" if request != "stop" else "stopped", action=request, step=self.step
                )
                kind = "cancelled" if request == "stop" else "preempted"
                reason = f"{request} was requested, left after step {self.step}"
                return self._leave(Outcome(kind, reason, self.step))
        self._finish_saving()
        self.checks.require_update(steps)
        if self.preparation is not None:
            self.preparation.finish(steps)
        return self._leave(Outcome("ok", f"all {steps} steps done", self.step))

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Around a step: compilation by torch is a phase, and reported afterwards."""
        if not self.run.train.compile:
            yield
            return
        from workers.training.parallel.compile import Compilation

        with Compilation(lambda: self.progress.phase, self.progress.enter) as compilation:
            yield
        taken = compilation.taken
        if taken is not None and self.trace.reports:
            self.recorder.event("compiled", step=self.step, **taken)

    def save_last_step(self) -> None:
        """Save the last finished step unless it has a checkpoint, and wait for it. Collective."""
        if self._saved != self.step:
            self._save(wait=True)
        self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for asynchronous checkpoints, as a phase of its own: its duration is unknown."""
        self.progress.enter("finishing")
        self.checkpointer.finish()

    def _leave(self, outcome: Outcome) -> Outcome:
        console.ended(outcome.reason)
        return outcome

    def _one_step(self) -> str | None:
        """One update and its point; returns the action requested on any rank."""
        number = self.step + 1
        self.trace.time_breakdown.enter("other")
        requests = self.control.poll()
        prepared = {} if self.preparation is None else self.preparation.prepare(number, self.sample)
        began = time.perf_counter()
        loss_sum, data_s = self._forward_backward()
        self.progress.enter("update")
        gradients = self._collect_gradients()
        pending = self._send(
            number, loss_sum=loss_sum, gradients=gradients, requests=requests, data_s=data_s
        )
        values, sums = self.report.read(pending)
        norm = values["grad_norm"]
        if math.isfinite(values["loss"]) and math.isfinite(norm):
            set_lr(self.optimizer, values["lr"])
            limit, scale = self.run.train.clip_norm, self.checks.gradient_scale
            update(self.optimizer, gradients, norm=norm, limit=limit, scale=scale)
            self._finish_update(gradients)
            if self.balancer and self.run.train.adapter is None:
                self.balancer.update(sums["balance"])
            self.checks.updated(number)
        elif not self.checks.skip(number, values["loss"]):
            self._fail(number, values)
        values |= self.checks.values | prepared
        if self.preparation is not None:
            synced_s = values.get("sync_s", 0.0)
            values |= self.preparation.after_update(number, pending.first, values)
            elsewhere_s = values.get("sync_s", 0.0) - synced_s
            values["update_s"] = time.perf_counter() - began - elsewhere_s
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = number
        self._after_step(number, self.tokens, values)
        return strongest(sums["requests"])

    def _finish_update(self, gradients: list[Tensor]) -> None:
        """After the optimizer's step: copies of weights, memory of the state."""
        self.parallel.finish_update()
        self.memory.count_state(gradients, self.optimizer)
        self._has_state = True

    def _send(
        self,
        number: int,
        *,
        loss_sum: Tensor,
        gradients: list[Tensor],
        requests: list[float],
        data_s: float,
    ) -> PendingReport:
        """Start step `number`'s all-reduce of metrics; its samples count as consumed now."""
        train, first = self.run.train, self.sample
        lr = lr_at(number, steps=train.steps, peak=train.optimizer.lr, schedule=train.lr_schedule)
        self.sample += self.run.plan.global_batch_size
        step_tokens = self.context.tokens(first)
        self.tokens += step_tokens
        return self.report.send(
            number,
            first=first,
            count=self.context.counts.of_samples(first, self.run.plan.global_batch_size),
            tokens=self.tokens,
            step_tokens=step_tokens,
            loss_sum=loss_sum,
            gradients=gradients,
            requests=requests,
            values={"lr": lr, "data_time_s": data_s, **self.passes.times()},
        )

    def _collect_gradients(self) -> list[Tensor]:
        """The step's gradients in the order of parameters.

        Raises RuntimeError if one is missing: some combination of techniques lost it, and the
        update would silently skip its weights.
        """
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

    def _forward_backward(self) -> tuple[Tensor, float]:
        """Run this rank's micro-batches: its share of the summed loss, seconds of data."""
        size = self.run.plan.global_batch_size
        self.context.objective.prepare(self.passes, self.context.samples, self.sample, size)
        for module in self.parallel.modules:
            module.train()
        # the balance loss is a mean over all sequences, to which each tensor-parallel rank adds
        if self.balancer:
            by_token = self.checks.loss_factor(self.run.tokens_per_step)
            self.balancer.scale_gradients(by_token * self.run.train.seq_len / self.run.plan.tp)
        return self.runner.forward_backward(self.sample, self.loss_factor(self.sample))

    def loss_factor(self, first: int) -> float:
        """The factor of the summed loss of the global batch from sample `first` on."""
        size = self.run.plan.global_batch_size
        return self.checks.loss_factor(self.context.counts.of_samples(first, size))

    def _after_step(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """Write the point of a logged step; `tokens` counts those up to it."""
        train = self.run.train
        self.trace.time_breakdown.enter(None)
        if not train.logs(step):
            return
        if train.validates(step):
            self.progress.enter("validation")
            values |= self.validate()
        values |= self.throughput.values() | self.memory.values() | self.trace.values()
        self.progress.enter("record")
        self.recorder.point(step=step, tokens=tokens, values=values)
        console.stepped(step, train.steps, values)

    def _next_boundary(self, number: int) -> int:
        """The first step from `number` on that ends with a checkpoint, a validation or the run."""
        train = self.run.train
        boundaries = [train.steps]
        for every in (
            train.checkpoint and train.checkpoint.every_steps,
            train.eval and train.eval.every_steps,
        ):
            if every:
                boundaries.append(-(-number // every) * every)
        return min(boundaries)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """`val_loss` and the objective's metrics over the first `eval.batches` global batches of
        held-out data, in order, without dropout.

        The samples are the same under any number of ranks.
        """
        spec, samples, objective = self.run.train.eval, self.held_out, self.context.objective
        assert spec is not None and samples is not None
        count = min(spec.batches * self.run.plan.global_batch_size, samples.windows)
        for module in self.parallel.modules:
            module.eval()
        objective.prepare(self.passes, samples, 0, count)
        total = self.runner.evaluate(samples, count)
        for module in self.parallel.modules:
            module.train()
        divisor = Counts(objective, samples).of_samples(0, count)
        loss, *sums = self.world.sum_(total).tolist()
        return objective.validation_values(loss / divisor, sums, count=divisor)

    def _save(self, *, wait: bool) -> None:
        self.progress.enter("checkpoint")
        manifest = manifest_of(
            self.run,
            step=self.step,
            tokens=self.tokens,
            samples=self.sample,
            world_size=self.world.size,
            loss_scale=self.checks.state,
            data_fingerprint=self.data_fingerprint,
        )
        if not self._has_state:  # every update so far was skipped
            fill_state(self.optimizer, self.parameters.values())
            self._has_state = True
        tensors = training_tensors(self.saved_weights(), self.optimizer)
        if self.preparation is not None:
            tensors |= self.preparation.tensors()
            manifest |= self.preparation.manifest()
        write_more = None
        if self.run.train.adapter is not None and self.base is not None:
            write_more = adapter_writer(
                self.parallel, self.run.train.adapter, self.run.model, self.base
            )
            manifest["base"] = {"path": self.base.path, "fingerprint": self.base.fingerprint}
        # an asynchronous save copies all states to memory, which states on disk avoid
        wait = wait or self.run.plan.offload == "nvme"
        self.checkpointer.save(
            tensors, step=self.step, manifest=manifest, wait=wait, write_more=write_more
        )
        self._saved = self.step

    def saved_weights(self) -> dict[str, Tensor]:
        """The weights of a checkpoint: all of them, or an adapter's alone."""
        adapts = self.run.train.adapter is not None
        return self.parallel.parameters() if adapts else self.parallel.weights()

    def _fail(self, number: int, values: dict[str, float]) -> NoReturn:
        """Raise for a step without update: the weights and the last checkpoint are sound."""
        parameters = self.checks.non_finite_gradients()
        self.recorder.point(step=number, tokens=self.tokens, values=values)
        self.progress.enter("locating")
        self.optimizer.zero_grad(set_to_none=True)
        # repeat the step to find its first non-finite number
        self.sample -= self.run.plan.global_batch_size
        raise self.checks.failure(
            number, values, parameters=parameters, repeat=self._forward_backward
        )
