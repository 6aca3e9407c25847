"""Every other rank's part of a team: compute what the leader tells, with its own share and stage,
until it ends.

Knows works and hidden states; knows no requests and chooses no token.
"""

from __future__ import annotations

import time
from copy import deepcopy

import torch
from torch import Tensor

from workers.inference.cpu.matmul import lay_out
from workers.inference.engine_builder import count_local_blocks, create_cache
from workers.inference.liveness import COMPUTES, IDLES, mark_layers
from workers.inference.metrics import memory_reader
from workers.inference.model_loading import LoadedModel
from workers.inference.parallel.groups import END
from workers.inference.parallel.messages import CACHE, IDLE, READ, ROOM, WORK, work_from
from workers.inference.runner import Runner
from workers.inference.scheduling.step_inputs import StepInputs
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.runtime.exits import Outcome

_POINT_S = 2.0


class Follower:
    """`go` until the leader ends. Raises ConnectionError where it is gone without a word."""

    def __init__(self, loaded: LoadedModel, recorder: Recorder, beacon: Beacon) -> None:
        assert loaded.team is not None
        self.loaded, self.team, self.recorder, self.beacon = loaded, loaded.team, recorder, beacon
        self.runner: Runner | None = None
        self.steps = self.tokens = 0
        self._told_s = 0.0
        mark_layers(loaded.decoder, beacon)

    def go(self) -> Outcome:
        while True:
            kind, numbers = self.team.told()
            if kind == END:
                self._point()
                place = self.team.place
                part = f"share {place.share} of stage {place.stage}"
                return Outcome(
                    "ok", f"computed {part} in {self.steps} steps, until rank 0 ended", self.steps
                )
            if kind == IDLE:
                self.beacon.mark(IDLES, step=self.steps)
            elif kind == ROOM:
                self.team.least(count_local_blocks(self.loaded)[0])
            elif kind == CACHE:
                self._make(*numbers)
            elif kind == READ:
                self._read(numbers)
            elif kind == WORK:
                self._compute(work_from(numbers))

    def _make(self, blocks: int, block_size: int, swap: int) -> None:
        """A cache, and a decoder over it; that which reads whole texts stays beside it, of the same
        tensors.
        """
        lay_out(self.loaded.decoder)
        tensors = [*self.loaded.decoder.parameters(), *self.loaded.decoder.buffers()]
        decoder = deepcopy(self.loaded.decoder, {id(each): each for each in tensors})
        self.runner = Runner(
            decoder, create_cache(self.loaded, blocks=blocks, block_size=block_size, swap=swap)
        )
        self._memory = memory_reader(self.runner.decoder, self.runner.cache)

    def _compute(self, work: StepInputs) -> None:
        assert self.runner is not None
        self.beacon.mark(COMPUTES, step=self.steps)
        self._give(self.runner.through(work, self._given((1, len(work.tokens)))))
        self.steps += 1
        self.tokens += len(work.tokens)
        if time.perf_counter() - self._told_s > _POINT_S:
            self._point()

    @torch.inference_mode()
    def _read(self, numbers: list[int]) -> None:
        self.beacon.mark(COMPUTES, step=self.steps)
        batch, length, *ids = numbers
        given = self._given((batch, length))
        if given is None:
            given = torch.tensor(ids, device=self.team.device).view(batch, length)
        self._give(self.loaded.decoder.through(given))
        self.steps += 1
        self.tokens += len(ids)

    def _given(self, shape: tuple[int, int]) -> Tensor | None:
        """What the stage before gives; None for the first."""
        if self.team.place.stage == 0:
            return None
        dtype = next(self.loaded.decoder.parameters()).dtype
        return self.team.given((*shape, self.loaded.spec.hidden), dtype)()

    def _give(self, hidden: Tensor) -> None:
        if not self.team.place.last:
            self.team.pass_on(hidden)

    def _point(self) -> None:
        """This rank's memory; what becomes of requests, the leader tells."""
        self._told_s = time.perf_counter()
        if self.runner is not None:
            self.recorder.point(step=self.steps, tokens=self.tokens, values=self._memory())
