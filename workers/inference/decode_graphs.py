"""CUDA graphs of decode steps, one per bucket of batch and table size, with persistent buffers.

A step in which each sequence has one token is one copy into a bucket's buffers and one replay, in
place of hundreds of launches. A bucket is captured after some steps in it. Does not depend on
models or sampling.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.inference.scheduling.step_inputs import StepInputs

log = logging.getLogger(__name__)

STEPS_BEFORE_CAPTURE = 4  # of a bucket: a capture costs about as much as some eager steps
MOST_GRAPHS = 64
_NARROWEST_TABLE = 8  # blocks

Replay = Callable[[], None]
# captures the function's work: replays it, and the tensor that each replay rewrites
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Device views of a bucket's buffer, int64: per sequence `[n]` a token, its position, the slot
    of its key and value (-1: padding) and the length of its context (0: padding); and the block
    `table` `[n, blocks]`.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lens: Tensor
    table: Tensor


class _Bucket:
    """The buffers of up to `sequences` sequences with `blocks` blocks each, and their graph."""

    def __init__(self, sequences: int, blocks: int, device: torch.device) -> None:
        size, pinned = sequences * (4 + blocks), device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        numbers = self._host.numpy()
        self._rows = numbers[: 4 * sequences].reshape(4, sequences)
        self._table = numbers[4 * sequences :].reshape(sequences, blocks)
        self._filled: list[list[int]] = [[]] * sequences
        tokens, positions, slots, lens, table = torch.split(
            self._device, [sequences] * 4 + [sequences * blocks]
        )
        self.batch = DecodeBatch(tokens, positions, slots, lens, table.view(sequences, blocks))
        self.steps = 0
        self.graph: tuple[Replay, Tensor] | None = None

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's numbers to the device, without waiting."""
        count = len(inputs.tokens)
        for row, values, padding in zip(
            self._rows,
            (inputs.tokens, inputs.positions, inputs.slots, inputs.context_lens),
            (0, 0, -1, 0),
            strict=True,
        ):
            row[:count] = values
            row[count:] = padding
        # a sequence gets another block every 16 tokens: most rows are those of the step before
        for index, blocks in enumerate(inputs.table):
            if blocks != self._filled[index]:
                self._table[index, : len(blocks)] = blocks
                self._filled[index] = blocks
        self._device.copy_(self._host, non_blocking=True)


class DecodeGraphs:
    """Runs decode steps by `compute(batch)` → logits `[n, vocab]`, captured per bucket.

    `compute` must launch the same work for any numbers in the batch, and read none of them on the
    host. If a capture fails, all steps run eagerly, for the reason `why_not`.
    """

    def __init__(
        self,
        compute: Callable[[DecodeBatch], Tensor],
        device: torch.device,
        *,
        capture: Capture | None = None,
    ) -> None:
        self.compute, self.device = compute, device
        self.why_not: str | None = None
        self.replays = 0
        self._capture = capture or _CudaCapture()
        self._buckets: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()

    def run(self, inputs: StepInputs) -> Tensor | None:
        """The step's logits `[sequences, vocab]`, valid until the next step; None: run it
        eagerly.
        """
        if self.why_not is not None or inputs.max_query_len != 1:
            return None
        count = len(inputs.tokens)
        if len(inputs.logit_indices) != count or inputs.adapter_slots:
            return None
        bucket = self._bucket(count, len(inputs.table[0]))
        bucket.steps += 1
        if bucket.graph is None and bucket.steps <= STEPS_BEFORE_CAPTURE:
            return None
        bucket.fill(inputs)
        if bucket.graph is None:
            try:
                bucket.graph = self._capture(lambda: self.compute(bucket.batch))
            except RuntimeError as error:
                self.clear()
                self.why_not = str(error).splitlines()[0][:200]
                log.warning("decode steps are not captured: %s", self.why_not)
                return None
        replay, logits = bucket.graph
        replay()
        self.replays += 1
        return logits[:count]

    def clear(self) -> None:
        """Drop all graphs: weights or cache have other addresses."""
        self._buckets.clear()

    def _bucket(self, sequences: int, blocks: int) -> _Bucket:
        key = round_up_batch(sequences), max(_NARROWEST_TABLE, 1 << (blocks - 1).bit_length())
        if key not in self._buckets:
            self._buckets[key] = _Bucket(*key, self.device)
            if len(self._buckets) > MOST_GRAPHS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return self._buckets[key]


def round_up_batch(sequences: int) -> int:
    """The batch size of a bucket: 1, 2, 4, then multiples of 8, above 64 of 32."""
    for size in (1, 2, 4):
        if sequences <= size:
            return size
    step = 8 if sequences <= 64 else 32
    return -(-sequences // step) * step


class _CudaCapture:
    """Captures on a stream of its own; all graphs share a memory pool, since one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        # kernels are compiled and libraries loaded outside of the capture; twice the same writes
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = function()
        return graph.replay, output
