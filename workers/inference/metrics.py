"""What a run tells of its engine: a point now and then, and one at the end.

Knows clocks and counts; no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from workers.inference.cache import PagedCache
from workers.inference.engine import Counts, Engine
from workers.inference.request import Request
from workers.metrics.kernel_choices import EVENT as KERNELS
from workers.metrics.kernel_choices import forget, kernels_chosen
from workers.metrics.memory import capacity_bytes, held_bytes, process_memory
from workers.metrics.recorder import Recorder
from workers.models.decoder import Decoder

EVERY_S = 0.5
_COUNTS = fields(Counts)


def memory_of(decoder: Decoder, cache: PagedCache) -> Callable[[], dict[str, float]]:
    """Whose call tells what this rank holds of weights and cache, which is counted once, and of its
    memory at all; a
    CPU's is the whole host's."""
    device = cache.keys[0].device
    held = {
        "memory/params_bytes": float(held_bytes([*decoder.parameters(), *decoder.buffers()])),
        "memory/kv_cache_bytes": float(held_bytes(cache.tensors())),
        "memory/capacity_bytes": float(capacity_bytes(device, local_world_size=1)),
    }

    def now() -> dict[str, float]:
        allocated, reserved = process_memory(device)
        return {
            **held,
            "memory/allocated_bytes": float(allocated),
            "memory/reserved_bytes": float(reserved),
        }

    return now


class Measure:
    """Means are over what ended, rates and shares over the time, since the last point; counts are
    since the start.

    TTFT counts from when a request was added; TPOT is the mean time between two tokens of one
    answer. The prefix hit
    rate is the share of prompt tokens that were found in the cache, the prefill share that of
    computed tokens that
    were a prompt's. Accepted per step counts the drafted tokens that became an answer's, a decoding
    request and step.
    `more` is asked for what the run itself counts.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, *, more: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self.engine, self.recorder, self._more = engine, recorder, more
        forget()  # what kernels were chosen for before
        self._at = time.perf_counter()
        self._before = Counts()
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._device = engine.runner.device
        self._memory = memory_of(engine.runner.decoder, engine.runner.cache)

    def ended(self, request: Request) -> None:
        if not request.first_token_s:
            return
        self._ttft_s.append(request.first_token_s - request.added_s)
        more = len(request.tokens) - len(request.prompt) - 1
        if more > 0:
            self._tpot_s.append((request.last_token_s - request.first_token_s) / more)

    def stepped(self) -> None:
        if time.perf_counter() - self._at >= EVERY_S:
            self._tell()

    def idled(self) -> None:
        """Nothing is left to do for the time being, which counts for no rate."""
        if self.engine.counts.steps > self._before.steps:
            self.stepped()
        else:
            self._at = time.perf_counter()

    def close(self) -> None:
        if self.engine.counts.steps > self._before.steps:
            self._tell()

    def _tell(self) -> None:
        counts, scheduler, now = self.engine.counts, self.engine.scheduler, time.perf_counter()
        since = Counts(
            **{
                each.name: getattr(counts, each.name) - getattr(self._before, each.name)
                for each in _COUNTS
            }
        )
        new, prompt, shared = since.new_tokens, since.prompt_tokens, since.shared_tokens
        values = {
            "inference/tokens_per_s": new / (now - self._at),
            "inference/running": float(len(scheduler.running)),
            "inference/waiting": float(len(scheduler.waiting)),
            "inference/kv_blocks_used": float(scheduler.pool.used),
            "inference/preemptions": float(scheduler.preemptions),
            "inference/swaps": float(scheduler.swaps),
            "inference/prompt_tokens": float(counts.prompt_tokens),
            "inference/shared_tokens": float(counts.shared_tokens),
            "inference/new_tokens": float(counts.new_tokens),
            **self._memory(),
            **self._more(),
        }
        if prompt + new:
            values["inference/prefill_share"] = prompt / (prompt + new)
        if prompt + shared:
            values["inference/prefix_hit_rate"] = shared / (prompt + shared)
        if since.decodes and since.drafted:
            values["inference/accepted_per_step"] = since.accepted / since.decodes
            values["inference/acceptance"] = since.accepted / since.drafted
        for name, seconds in (("ttft_s", self._ttft_s), ("tpot_s", self._tpot_s)):
            if seconds:
                values[f"inference/{name}"] = sum(seconds) / len(seconds)
                seconds.clear()
        self.recorder.point(
            step=counts.steps, tokens=counts.prompt_tokens + counts.new_tokens, values=values
        )
        if not self._before.steps:
            self.recorder.event(KERNELS, **kernels_chosen(self._device))
        self._at, self._before = now, replace(counts)
