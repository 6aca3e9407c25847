"""PipeDream (arXiv 1806.03377, section 3.3): 1F1B without flushes; every batch updates the weights.

Handles one stage's batches, weight versions and neighbors. Does not depend on optimizer steps or
metrics (`pipedream_loop`).

Staleness: with S stages s = 0 … S - 1 and version v the weights after v updates, stage s computes
batch b with version max(f, b - S + s), where f is the last flush. With vertical sync every stage
uses the version of stage 0, max(f, b - S). With weight stashing the backward pass uses the version
of its forward pass, so the gradient is that of the loss. Without, it uses the newest weights,
version b - 1, with the activations of the older ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from workers.training.data.rows import RowSource
from workers.training.loop.step_context import StepContext
from workers.training.parallel.batch_sharding import Microbatch
from workers.training.parallel.mesh import extra_group
from workers.training.parallel.pipeline.pipedream_tied_embedding import StaleTiedEmbedding
from workers.training.parallel.pipeline.stage_transfer import (
    boundary_tensors,
    global_rank,
    pipeline_evaluate,
    pipeline_logits,
)

Version = dict[str, Tensor]


class PipeDreamRunner:
    """A `MicrobatchRunner` over this rank's stage.

    `turn(b)` leaves batch b's gradients on the parameters, not yet reduced over ranks. A batch is
    a step's micro-batches of this data-parallel rank. Forward passes run ahead of backward passes
    by the number of stages after this one, up to the horizon, at which the pipeline is flushed.
    """

    def __init__(self, context: StepContext) -> None:
        """Weight stashing is on and vertical sync off by default, as in the paper. Collective."""
        plan = context.run.plan
        self.context = context
        self.stashing = plan.weight_stashing is not False
        self.vertical_sync = bool(plan.vertical_sync)
        self.axis = axis = context.world.axis("pp")
        self.stages, self.stage = axis.size, axis.rank
        [self.module], [part] = context.parallel.modules, context.parallel.parts
        self.input_like, self.output_like = boundary_tensors(part, context)
        self.parameters: Version = dict(self.module.named_parameters())
        # activations and gradients cross; on one communicator each would wait for the other
        self.backward_group = extra_group(context.world, "pp", "back")
        # the last step at which the pipeline was empty, and the first sample after it
        self.flushed = self._samples = 0
        self.data_s = 0.0  # of the last turn
        self._issued = 0  # the last batch whose forward pass ran here
        self._in_flight: deque[tuple[list[tuple[Tensor, Tensor]], Version]] = deque()
        self._versions: dict[int, Version] = {}
        self._sends: deque[tuple[Any, Tensor]] = deque()

    @property
    def lag(self) -> int:
        """Number of batches by which forward passes are ahead of backward passes here."""
        return self.stages - 1 - self.stage

    def begin(self, step: int, *, samples: int) -> None:
        """Start after a flush at `step` with the current weights; the next sample is `samples`."""
        self.flushed = self._issued = step
        self._samples = samples
        self._versions.clear()

    def version_of(self, batch: int) -> int:
        """The weight version with which this stage computes `batch`."""
        back = self.stages if self.vertical_sync else self.stages - self.stage
        return max(self.flushed, batch - back)

    def forward_backward(self, first: int, factor: float) -> tuple[Tensor, float]:
        """One batch through an empty pipeline, as at a flush: to repeat a step."""
        self.begin(0, samples=first)
        total = self.turn(1, horizon=1, factor=lambda _: factor)
        self.finish_gradients(flushing=True)
        return total, self.data_s

    def finish_gradients(self, *, flushing: bool) -> None:
        """Reduce gradients after a turn; those of a tied embedding with `StaleTiedEmbedding`'s
        delay.
        """
        tied = self.context.parallel.tied_embedding
        if isinstance(tied, StaleTiedEmbedding):
            tied.flushing = flushing
        self.context.parallel.finish_gradients()

    def evaluate(self, samples: RowSource, count: int, *, phase: str = "validation") -> Tensor:
        """See `MicrobatchRunner`."""
        return pipeline_evaluate(self.context, samples, count, phase=phase)

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        """See `MicrobatchRunner`."""
        return pipeline_logits(self.context, tokens_BS, at)

    def turn(self, batch: int, *, horizon: int, factor: Callable[[int], float]) -> Tensor:
        """Forward passes up to `batch` + lag, at most `horizon`; then the backward pass of `batch`.

        Call it before the update by `batch`. `factor` gives a batch's loss factor by its first
        sample. Returns this rank's summed loss of `batch`; 0 except on the last stage.
        """
        self._store_version(batch - 1)
        self.data_s = 0.0
        context, count = self.context, len(self._microbatches(batch))
        timeline = context.trace.timeline
        assert timeline is not None
        timeline.begin()
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        while self._issued < min(batch + self.lag, horizon):
            self._issued += 1
            # micro-batches count from this batch's first; those of later batches follow
            scale = factor(self._first_sample(self._issued))
            total += self._forward(self._issued, scale, first=(self._issued - batch) * count)
        self._backward()
        while len(self._sends) > 4 * self.stages * count:
            self._sends.popleft()[0].wait()
        timeline.end()
        return total * context.loss_share

    def drain(self) -> None:
        """At the horizon: wait for all sends."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _microbatches(self, batch: int) -> list[Microbatch]:
        size = self.context.run.plan.global_batch_size
        return self.context.microbatches(self._first_sample(batch), size)

    def _first_sample(self, batch: int) -> int:
        size = self.context.run.plan.global_batch_size
        return self._samples + (batch - 1 - self.flushed) * size

    def _forward(self, batch: int, factor: float, *, first: int) -> Tensor:
        context = self.context
        context.progress.enter("forward")
        weights = self._weights_for(batch)
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        passes = []
        for index, microbatch in enumerate(self._microbatches(batch)):
            started = time.perf_counter()
            with context.trace.time_breakdown.within("data"):
                loaded = context.load(context.samples, microbatch)
            self.data_s += time.perf_counter() - started
            x = (
                loaded.inputs
                if self.stage == 0
                else self._receive(self.input_like, self.stage - 1, self.axis.group)
            )
            context.seed_dropout(microbatch)
            with context.trace.action("F", self.stage, first + index):
                out: Tensor = functional_call(
                    self.module, weights, (x.requires_grad_(self.stage > 0), loaded.documents)
                )
                if self.stage == self.stages - 1:
                    loss = context.loss(out, loaded)
                    total += loss.detach()
                    out = loss * factor
            if self.stage < self.stages - 1:
                self._send(out.detach(), self.stage + 1, self.axis.group)
            passes.append((x, out))
        self._in_flight.append((passes, weights))
        return total

    def _backward(self) -> None:
        self.context.progress.enter("backward")
        passes, weights = self._in_flight.popleft()
        if not self.stashing and weights is not self.parameters:
            for name, each in weights.items():
                with unversioned([each]):
                    each.copy_(self.parameters[name])
        for index, (x, out) in enumerate(passes):
            gradient = None
            if self.stage < self.stages - 1:
                gradient = self._receive(self.output_like, self.stage + 1, self.backward_group)
            with self.context.trace.action("B", self.stage, index), self._recompute_with(weights):
                torch.autograd.backward(out, gradient)
            if self.stage > 0:
                assert x.grad is not None
                self._send(x.grad, self.stage - 1, self.backward_group)
        for name, parameter in self.parameters.items():
            if weights[name] is not parameter:
                parameter.grad, weights[name].grad = weights[name].grad, None

    def _recompute_with(self, weights: Version) -> AbstractContextManager[None]:
        """Around a backward pass: recomputation reads the weights of the forward pass."""
        if self.context.run.plan.recompute == "none" or weights is self.parameters:
            return nullcontext()
        swapped: AbstractContextManager[None] = _reparametrize_module(self.module, weights)
        return swapped

    def _store_version(self, version: int) -> None:
        """Copy the current weights if a batch uses them after they have changed."""
        if self.vertical_sync or (self.stashing and self.lag):
            self._versions[version] = _copy(self.parameters)
        oldest = self.version_of(self._issued + 1)
        for old in [each for each in self._versions if each < oldest]:
            del self._versions[old]  # batches in flight hold theirs

    def _weights_for(self, batch: int) -> Version:
        """The weights of a batch's forward pass, stored for its backward pass.

        Without stashing these are the parameters, which change in place; a version of vertical
        sync is then a copy for this batch, into which `_backward` copies the newest weights.
        """
        weights = self._versions.get(self.version_of(batch), self.parameters)
        return weights if self.stashing or weights is self.parameters else _copy(weights)

    def _receive(self, like: Tensor, stage: int, group: Any) -> Tensor:
        received = torch.empty_like(like, device=self.context.world.device, requires_grad=False)
        dist.recv(received, global_rank(self.axis, stage), group)
        return received

    def _send(self, tensor: Tensor, stage: int, group: Any) -> None:
        tensor = tensor.contiguous()
        self._sends.append((dist.isend(tensor, global_rank(self.axis, stage), group), tensor))


@contextmanager
def unversioned(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hide in-place changes from autograd: pending backward passes use the new values."""
    preserve: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    with torch.no_grad(), preserve(tuple(tensors)):
        yield


def _copy(weights: Version) -> Version:
    return {
        name: each.detach().clone().requires_grad_(each.requires_grad)
        for name, each in weights.items()
    }
