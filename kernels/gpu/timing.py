"""Times calls on the GPU: captured in a CUDA graph, L2 flushed before each, providers interleaved.

Interleaved rounds distribute changes of clocks and heat over the providers. Does not depend on any
operation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

ROUNDS = 3
FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H200 (50 MB)
ROUND_S = 0.06

Prepared = tuple[Callable[[], object], bool]
"""The timed function, and whether it replays the call's CUDA graph."""


@dataclass(frozen=True)
class Timed:
    """Median time of a call, and the range of the rounds' medians relative to it."""

    ms: float
    spread: float
    graphed: bool


class Timer:
    """Times calls on one device; owns the buffer that flushes L2."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def together(
        self,
        calls: Mapping[str, Callable[[], object]],
        round_s: float = ROUND_S,
        reads: bool = False,
    ) -> dict[str, Timed]:
        """Times the calls, interleaved."""
        return self.times(
            {name: self.prepared(call) for name, call in calls.items()}, round_s, reads
        )

    def times(
        self, prepared: Mapping[str, Prepared], round_s: float = ROUND_S, reads: bool = False
    ) -> dict[str, Timed]:
        """Times the results of `prepared`, interleaved over ROUNDS rounds of about `round_s`
        seconds each.

        The flush leaves L2 full of lines that must be written back at the call's cost, while the
        call leaves its own lines behind; this is balanced for calls that write as much. Calls that
        mostly read get clean lines (`reads`).
        """
        first_times = {
            name: self._round(replay, 3, reads) for name, (replay, _) in prepared.items()
        }
        times: dict[str, list[float]] = {name: [] for name in prepared}
        for _ in range(ROUNDS):
            for name, (replay, _) in prepared.items():
                repeats = int(
                    min(
                        200, max(5, round_s * 1e3 / max(statistics.median(first_times[name]), 0.01))
                    )
                )
                times[name].append(statistics.median(self._round(replay, repeats, reads)))
        times_by_name = {}
        for name, rounds in times.items():
            middle = statistics.median(rounds)
            times_by_name[name] = Timed(
                middle, (max(rounds) - min(rounds)) / middle, prepared[name][1]
            )
        return times_by_name

    def prepared(self, call: Callable[[], object]) -> Prepared:
        """The call as a replay of its CUDA graph, or unchanged if it cannot be captured (it
        synchronizes).

        A synchronizing call is detected first: a failed capture may leave torch's random generator
        in capture mode, and no later case could draw numbers. If a capture still fails, the
        generator gets a fresh state. The capture uses the current stream, which must not be the
        default one: backward runs on its forward's stream, so the timed tensors must be created on
        this stream too.
        """
        for _ in range(3):
            call()
        torch.cuda.synchronize(self._device)
        if self._waits(call):
            return call, False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self._device)):
                call()
        except RuntimeError:
            torch.cuda.synchronize(self._device)
            generator = torch.cuda.default_generators[self._device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            return call, False
        return graph.replay, True

    def _waits(self, call: Callable[[], object]) -> bool:
        """Whether the call synchronizes with the GPU, as .item() does."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.synchronize(self._device)
        return False

    def _round(self, replay: Callable[[], object], repeats: int, reads: bool) -> list[float]:
        """Milliseconds of each of `repeats` calls, without the flush before each."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for start, end in events:
            self._flush.zero_()
            if reads:
                self._flush.view(torch.int32).max()
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in events]
