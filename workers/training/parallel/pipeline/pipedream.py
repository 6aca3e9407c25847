"""PipeDream (arXiv 1806.03377, section 3.3): 1F1B that never flushes, its weights updated by every
batch on its own.

Knows one stage's batches, weight versions and neighbours; optimizer steps and metrics are
`asynchronous`'s.

Staleness, with S stages numbered s = 0 to S - 1 and version v the weights after v updates: stage s
computes batch b
with version max(f, b - S + s), f being the last flush; with vertical sync every stage takes that of
stage 0, max(f,
b - S). With weight stashing the backward pass uses the version of its forward pass, so that the
gradient is one of the
loss; without, it uses what the weights are by then, version b - 1, with the activations of the
older ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from workers.training.data.samples import Samples
from workers.training.loop.microbatches import Setting
from workers.training.parallel.batch_sharding import Block
from workers.training.parallel.group_cache import once
from workers.training.parallel.mesh import World
from workers.training.parallel.pipeline.pipedream_tied_embedding import StaleTies
from workers.training.parallel.pipeline.stage_transfer import (
    ends_of,
    evaluate,
    global_rank,
    logits_of,
)

Version = dict[str, Tensor]


class PipeDream:
    """This rank's stage. `turn(b)` leaves batch b's gradients on the parameters, not yet reduced
    over other ranks.

    A batch is a step's micro-batches of this data-parallel rank. Forward passes run ahead of
    backward passes by the
    stages behind this one, and stop at the horizon, where the pipeline is flushed.
    """

    def __init__(self, setting: Setting) -> None:
        """Weight stashing unless the plan says no, vertical sync if it says so, as in the paper's
        own default.
        """
        plan = setting.run.plan
        self.setting = setting
        self.stashing, self.vertical_sync = (
            plan.weight_stashing is not False,
            bool(plan.vertical_sync),
        )
        self.axis = axis = setting.world.axis("pp")
        self.stages, self.stage = axis.size, axis.rank
        [self.module], [part] = setting.parallel.modules, setting.parallel.parts
        self.ends = ends_of(part, setting)
        self.parameters: Version = dict(self.module.named_parameters())
        # activations and gradients cross each other; on one communicator each would wait for the
        # other's turn
        self.back = once(("back", axis.size), lambda: _second_group(setting.world))
        self.ties = setting.parallel.ties
        if isinstance(self.ties, StaleTies):
            made = (
                once((name, axis.size), lambda: _second_group(setting.world))
                for name in ("to last", "to first")
            )
            self.ties.groups = next(made), next(made)
        # the last step at which nothing was under way, and the samples until then
        self.flushed = self._samples = 0
        self.data_s = 0.0  # of the last turn
        self._issued = 0  # the last batch that went forward here
        self._under_way: deque[tuple[list[tuple[Tensor, Tensor]], Version]] = deque()
        self._versions: dict[int, Version] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @property
    def lag(self) -> int:
        """Forward passes that this stage is ahead of its backward passes."""
        return self.stages - 1 - self.stage

    def begin(self, step: int, *, samples: int) -> None:
        """After a flush at `step`: the weights of now are what the next batches begin with, the
        first at `samples`.
        """
        self.flushed = self._issued = step
        self._samples = samples
        self._versions.clear()

    def version_of(self, batch: int) -> int:
        """The version that stage computes `batch` with."""
        back = self.stages if self.vertical_sync else self.stages - self.stage
        return max(self.flushed, batch - back)

    def gradients(self, first: int, factor: float) -> tuple[Tensor, float]:
        """One batch through an empty pipeline, as at a flush: for a step that is done once more."""
        self.begin(0, samples=first)
        total = self.turn(1, horizon=1, factor=factor)
        self.finish_gradients(flushing=True)
        return total, self.data_s

    def finish_gradients(self, *, flushing: bool) -> None:
        """After a turn: gradients are reduced, those of a tied embedding as late as `StaleTies`
        says.
        """
        if isinstance(self.ties, StaleTies):
            self.ties.flushing = flushing
        self.setting.parallel.finish_gradients()

    def evaluate(self, samples: Samples, count: int) -> Tensor:
        return evaluate(self.setting, samples, count)

    def logits(self, tokens_BS: Tensor, at: Sequence[int]) -> dict[int, Tensor]:
        return logits_of(self.setting, tokens_BS, at)

    def turn(self, batch: int, *, horizon: int, factor: float) -> Tensor:
        """Forward passes up to `batch` + lag, at most to `horizon`; then the backward pass of
        `batch`.

        Called before the update by `batch`. Returns this rank's summed token loss of `batch`, 0 but
        on the last stage.
        """
        self._keep(batch - 1)
        self.data_s = 0.0
        here, count = self.setting, len(self._blocks(batch))
        timeline = here.trace.timeline
        assert timeline is not None
        timeline.begin()
        total = torch.zeros((), dtype=torch.float64, device=self.setting.world.device)
        while self._issued < min(batch + self.lag, horizon):
            self._issued += 1
            # micro-batches count from this batch's first: those of batches ahead come after
            total += self._forward(self._issued, factor, first=(self._issued - batch) * count)
        self._backward()
        while len(self._sent) > 4 * self.stages * count:
            self._sent.popleft()[0].wait()
        timeline.end()
        return total * here.share

    def drain(self) -> None:
        """At the horizon: everything that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _blocks(self, batch: int) -> list[Block]:
        size = self.setting.run.plan.global_batch_size
        return self.setting.blocks(self._samples + (batch - 1 - self.flushed) * size, size)

    def _forward(self, batch: int, factor: float, *, first: int) -> Tensor:
        here = self.setting
        here.tell("forward")
        weights = self._weights_for(batch)
        total = torch.zeros((), dtype=torch.float64, device=here.world.device)
        kept = []
        for place, block in enumerate(self._blocks(batch)):
            started = time.perf_counter()
            with here.trace.split.within("data"):
                inputs, targets, documents = here.tensors(here.train, block)
            self.data_s += time.perf_counter() - started
            x = (
                inputs
                if self.stage == 0
                else self._receive(self.ends[0], self.stage - 1, self.axis.group)
            )
            here.seed_dropout(block)
            with here.trace.action("F", self.stage, first + place):
                out: Tensor = functional_call(
                    self.module, weights, (x.requires_grad_(self.stage > 0), documents)
                )
                if self.stage == self.stages - 1:
                    loss = here.loss(out, targets, block)
                    total += loss.detach()
                    out = loss * factor
            if self.stage < self.stages - 1:
                self._send(out.detach(), self.stage + 1, self.axis.group)
            kept.append((x, out))
        self._under_way.append((kept, weights))
        return total

    def _backward(self) -> None:
        self.setting.tell("backward")
        kept, weights = self._under_way.popleft()
        if not self.stashing and weights is not self.parameters:
            for name, each in weights.items():
                with unchanged([each]):
                    each.copy_(self.parameters[name])
        for place, (x, out) in enumerate(kept):
            gradient = None
            if self.stage < self.stages - 1:
                gradient = self._receive(self.ends[1], self.stage + 1, self.back)
            with self.setting.trace.action("B", self.stage, place), self._again_with(weights):
                torch.autograd.backward(out, gradient)
            if self.stage > 0:
                assert x.grad is not None
                self._send(x.grad, self.stage - 1, self.back)
        for name, parameter in self.parameters.items():
            if weights[name] is not parameter:
                parameter.grad, weights[name].grad = weights[name].grad, None

    def _again_with(self, weights: Version) -> AbstractContextManager[None]:
        """Around a backward pass: what it recomputes reads the weights that the forward pass had."""
        if self.setting.run.plan.recompute == "none" or weights is self.parameters:
            return nullcontext()
        swapped: AbstractContextManager[None] = _reparametrize_module(self.module, weights)
        return swapped

    def _keep(self, version: int) -> None:
        """Copy the weights of now, where a batch is computed with them after they have changed."""
        if self.vertical_sync or (self.stashing and self.lag):
            self._versions[version] = _copy(self.parameters)
        oldest = self.version_of(self._issued + 1)
        for old in [each for each in self._versions if each < oldest]:
            del self._versions[old]  # batches under way hold theirs by themselves

    def _weights_for(self, batch: int) -> Version:
        """What the forward pass of a batch computes with, and keeps for its backward pass.

        Without stashing that is the parameters themselves, which change under it; a version of
        vertical sync is then
        this batch's own copy, into which `_backward` puts the newest weights.
        """
        weights = self._versions.get(self.version_of(batch), self.parameters)
        return weights if self.stashing or weights is self.parameters else _copy(weights)

    def _receive(self, like: Tensor, stage: int, group: Any) -> Tensor:
        found = torch.empty_like(like, device=self.setting.world.device, requires_grad=False)
        dist.recv(found, global_rank(self.axis, stage), group)
        return found

    def _send(self, tensor: Tensor, stage: int, group: Any) -> None:
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, global_rank(self.axis, stage), group), tensor))


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Changes within go unnoticed by autograd: backward passes under way then use the new values,
    as is meant here.
    """
    preserve: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    with torch.no_grad(), preserve(tuple(tensors)):
        yield


def _copy(weights: Version) -> Version:
    return {
        name: each.detach().clone().requires_grad_(each.requires_grad)
        for name, each in weights.items()
    }


def _second_group(world: World) -> Any:
    """Another process group of the same ranks as this rank's pipeline; all ranks of the world take
    part.
    """
    mesh = world.axis("pp").mesh
    assert mesh is not None
    lines: list[Any] = [None] * world.size
    dist.all_gather_object(lines, mesh.mesh.flatten().tolist())
    found = None
    for line in sorted({tuple(each) for each in lines}):
        group = dist.new_group(list(line))
        found = group if world.rank in line else found
    return found
