"""A worker rank: computes the driver's steps with its own shard and stage until the driver ends.

Does not depend on requests and samples no token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from workers.inference.adapters.files import file_digest
from workers.inference.adapters.low_rank_slots import LowRankSlots
from workers.inference.cpu.matmul import use_onednn_layout
from workers.inference.engine_builder import (
    count_local_blocks,
    create_adapter_slots,
    create_cache,
)
from workers.inference.liveness import COMPUTES, IDLES, mark_layers
from workers.inference.metrics import memory_reader
from workers.inference.model_loading import LoadedModel
from workers.inference.parallel.messages import (
    CACHE,
    COUNT_BLOCKS,
    DROP_ADAPTER,
    END,
    IDLE,
    LOAD_ADAPTER,
    PLACE_ADAPTER,
    READ,
    STEP,
    decode_step_inputs,
)
from workers.inference.runner import Runner
from workers.inference.scheduling.step_inputs import StepInputs
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.models.adapters.peft_files import LowRank, read_adapter
from workers.models.errors import WeightsError
from workers.runtime.exit_codes import Outcome

_POINT_S = 2.0


class Worker:
    """Call `run`; it returns when the driver ends."""

    def __init__(self, loaded: LoadedModel, recorder: Recorder, beacon: Beacon) -> None:
        assert loaded.rank_group is not None
        self.loaded, self.rank_group = loaded, loaded.rank_group
        self.recorder, self.beacon = recorder, beacon
        self.runner: Runner | None = None
        self.steps = self.tokens = 0
        self._recorded_s = 0.0
        self._slots: LowRankSlots | None = None
        self._updates: dict[int, Mapping[str, LowRank]] = {}  # of adapters, by number
        mark_layers(loaded.decoder, beacon)

    def run(self) -> Outcome:
        """Handle messages until the end. Raises ConnectionError if the driver disconnects."""
        while True:
            kind, numbers = self.rank_group.receive()
            if kind == END:
                self._record_point()
                place = self.rank_group.place
                part = f"share {place.share} of stage {place.stage}"
                return Outcome(
                    "ok", f"computed {part} in {self.steps} steps, until rank 0 ended", self.steps
                )
            if kind == IDLE:
                self.beacon.mark(IDLES, step=self.steps)
            elif kind == COUNT_BLOCKS:
                self.rank_group.min_over_ranks(count_local_blocks(self.loaded)[0])
            elif kind == CACHE:
                self._create_runner(*numbers)
            elif kind == READ:
                self._read(numbers)
            elif kind == LOAD_ADAPTER:
                self._load_adapter(numbers[0], bytes(numbers[1:]).decode())
            elif kind == PLACE_ADAPTER and self._slots is not None:
                self._slots.fill(numbers[1], self._updates[numbers[0]])
            elif kind == DROP_ADAPTER:
                self._updates.pop(numbers[0], None)
            elif kind == STEP:
                self._compute(decode_step_inputs(numbers))

    def _create_runner(self, blocks: int, block_size: int, swap: int) -> None:
        """A cache and a decoder over it; the loaded decoder keeps reading full texts.

        Both share tensors.
        """
        use_onednn_layout(self.loaded.decoder)
        tensors = [*self.loaded.decoder.parameters(), *self.loaded.decoder.buffers()]
        decoder = deepcopy(self.loaded.decoder, {id(tensor): tensor for tensor in tensors})
        cache = create_cache(self.loaded, blocks=blocks, block_size=block_size, swap=swap)
        self._slots = create_adapter_slots(self.loaded, decoder)
        self.runner = Runner(decoder, cache, self._slots)
        self._memory = memory_reader(self.runner.decoder, self.runner.cache)

    def _load_adapter(self, number: int, text: str) -> None:
        """Read an adapter's factors, and report whether they are the driver's files."""
        digest, _, folder = text.partition("\n")
        try:
            same = file_digest(Path(folder)) == digest
            if same:
                self._updates[number] = read_adapter(Path(folder), self.loaded.spec).low_rank
        except WeightsError:
            same = False
        self.rank_group.min_over_ranks(int(same))

    def _compute(self, inputs: StepInputs) -> None:
        assert self.runner is not None
        self.beacon.mark(COMPUTES, step=self.steps)
        self._send(self.runner.through(inputs, self._receive((1, len(inputs.tokens)))))
        self.steps += 1
        self.tokens += len(inputs.tokens)
        if time.perf_counter() - self._recorded_s > _POINT_S:
            self._record_point()

    @torch.inference_mode()
    def _read(self, numbers: list[int]) -> None:
        self.beacon.mark(COMPUTES, step=self.steps)
        batch, length, *ids = numbers
        x = self._receive((batch, length))
        if x is None:
            x = torch.tensor(ids, device=self.rank_group.device).view(batch, length)
        self._send(self.loaded.decoder.through(x))
        self.steps += 1
        self.tokens += len(ids)

    def _receive(self, shape: tuple[int, int]) -> Tensor | None:
        """Hidden states of the previous stage; None for the first stage."""
        if self.rank_group.place.stage == 0:
            return None
        dtype = next(self.loaded.decoder.parameters()).dtype
        return self.rank_group.receive_hidden((*shape, self.loaded.spec.hidden), dtype)()

    def _send(self, hidden: Tensor) -> None:
        if not self.rank_group.place.last:
            self.rank_group.send_hidden(hidden)

    def _record_point(self) -> None:
        """Record this rank's memory; the driver reports requests."""
        self._recorded_s = time.perf_counter()
        if self.runner is not None:
            self.recorder.point(step=self.steps, tokens=self.tokens, values=self._memory())
