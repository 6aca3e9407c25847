"""Metrics of an engine: a point at most every half second while it computes, and one at the end.

Reads clocks and counts only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from workers.inference.engine import Engine, EngineCounts
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.request import Request
from workers.metrics.kernel_choices import EVENT as KERNELS
from workers.metrics.kernel_choices import clear_records, kernels_chosen
from workers.metrics.memory import capacity_bytes, held_bytes, process_memory
from workers.metrics.recorder import Recorder
from workers.models.decoder import Decoder

EVERY_S = 0.5
_COUNT_FIELDS = fields(EngineCounts)


def memory_reader(decoder: Decoder, cache: PagedCache) -> Callable[[], dict[str, float]]:
    """A function that returns this rank's `memory/` metrics in bytes.

    Weights and cache are counted once; on a CPU, allocated memory is that of the whole host.
    """
    device = cache.keys[0].device
    constant = {
        "memory/params_bytes": float(held_bytes([*decoder.parameters(), *decoder.buffers()])),
        "memory/kv_cache_bytes": float(held_bytes(cache.tensors())),
        "memory/capacity_bytes": float(capacity_bytes(device, local_world_size=1)),
    }

    def read() -> dict[str, float]:
        allocated, reserved = process_memory(device)
        return {
            **constant,
            "memory/allocated_bytes": float(allocated),
            "memory/reserved_bytes": float(reserved),
        }

    return read


class EngineMetrics:
    """Writes points. Means and rates cover the time since the last point, counts since the start.

    TTFT counts from when a request was added; TPOT is the mean time between tokens of one answer.
    A reward model writes no tokens: its requests count as `score_s`, from added to scored, and
    `scores_per_s`.
    `prefix_hit_rate` is the share of prompt tokens found in the cache, `prefill_share` the share
    of prompt tokens among computed tokens, `accepted_per_step` the accepted drafts per decoding
    request and step, `host_s` the host's own time per step. `more` returns further values of the
    run.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, *, more: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self.engine, self.recorder, self._more = engine, recorder, more
        clear_records()  # kernel choices from before this engine
        self._at = time.perf_counter()
        self._before = EngineCounts()
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._score_s: list[float] = []
        self._scores = False  # whether any request was scored
        self._device = engine.runner.device
        self._memory = memory_reader(engine.runner.decoder, engine.runner.cache)

    def request_finished(self, request: Request) -> None:
        """Record the latencies of a finished request."""
        if not request.first_token_s:
            return
        if request.sampling.pooled:
            self._scores = True
            self._score_s.append(request.first_token_s - request.added_s)
            return
        self._ttft_s.append(request.first_token_s - request.added_s)
        more = len(request.tokens) - len(request.prompt) - 1
        if more > 0:
            self._tpot_s.append((request.last_token_s - request.first_token_s) / more)

    def step_finished(self) -> None:
        """Write a point if the last one is old enough."""
        if time.perf_counter() - self._at >= EVERY_S:
            self._write()

    def idle(self) -> None:
        """Record that nothing is left to compute; idle time does not count in rates."""
        if self.engine.counts.steps > self._before.steps:
            self.step_finished()
        else:
            self._at = time.perf_counter()

    def close(self) -> None:
        """Write the last point."""
        if self.engine.counts.steps > self._before.steps:
            self._write()

    def _write(self) -> None:
        counts, scheduler, now = self.engine.counts, self.engine.scheduler, time.perf_counter()
        since = EngineCounts(
            **{
                field.name: getattr(counts, field.name) - getattr(self._before, field.name)
                for field in _COUNT_FIELDS
            }
        )
        output, prompt, cached = since.output_tokens, since.prompt_tokens, since.cached_tokens
        values = {
            "inference/host_s": since.host_s / max(since.steps, 1),
            "inference/running": float(len(scheduler.running)),
            "inference/waiting": float(len(scheduler.waiting)),
            "inference/kv_blocks_used": float(scheduler.pool.used),
            "inference/preemptions": float(scheduler.preemption.count),
            "inference/swaps": float(scheduler.swapper.total),
            "inference/prompt_tokens": float(counts.prompt_tokens),
            "inference/shared_tokens": float(counts.cached_tokens),
            "inference/new_tokens": float(counts.output_tokens),
            **self._memory(),
            **self._more(),
        }
        if self._score_s:
            values["inference/scores_per_s"] = len(self._score_s) / (now - self._at)
        if output or not self._scores:
            values["inference/tokens_per_s"] = output / (now - self._at)
        if prompt + output:
            values["inference/prefill_share"] = prompt / (prompt + output)
        if prompt + cached:
            values["inference/prefix_hit_rate"] = cached / (prompt + cached)
        if since.decode_steps and since.drafted:
            values["inference/accepted_per_step"] = since.accepted / since.decode_steps
            values["inference/acceptance"] = since.accepted / since.drafted
        for name, seconds in (
            ("ttft_s", self._ttft_s),
            ("tpot_s", self._tpot_s),
            ("score_s", self._score_s),
        ):
            if seconds:
                values[f"inference/{name}"] = sum(seconds) / len(seconds)
                seconds.clear()
        self.recorder.point(
            step=counts.steps, tokens=counts.prompt_tokens + counts.output_tokens, values=values
        )
        if not self._before.steps:
            self.recorder.event(KERNELS, **kernels_chosen(self._device))
        self._at, self._before = now, replace(counts)
