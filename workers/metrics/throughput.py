"""Throughput of logged steps: tokens/s, TFLOP/s, MFU and HFU from durations common to all ranks.

MFU: PaLM, arXiv 2204.02311, appendix B.
"""

from __future__ import annotations


class Throughput:
    """Accumulates steps between two logged ones.

    `flops_per_token` is of the model, of which `head_flops_per_token` for a position with logits;
    `peak_flops` of one device; `hardware_factor` is executed over model FLOPs, above 1 with
    recomputation.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops: float,
        devices: int,
        head_flops_per_token: float = 0.0,
        hardware_factor: float = 1.0,
    ) -> None:
        self.flops_per_token, self.peak_flops, self.devices = flops_per_token, peak_flops, devices
        self.head_flops_per_token, self.hardware_factor = head_flops_per_token, hardware_factor
        self._seconds, self._tokens, self._without_logits, self._steps = 0.0, 0, 0.0, 0

    def step(self, *, seconds: float, tokens: int, with_logits: float | None = None) -> None:
        """Add a step: its duration and the tokens of its global batch.

        `with_logits`: those whose logits were computed, if the others' were not.
        """
        self._seconds += seconds
        self._tokens += tokens
        self._without_logits += 0.0 if with_logits is None else max(0.0, tokens - with_logits)
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Metrics of the steps since the last call; resets the sums."""
        seconds, steps = max(self._seconds, 1e-9), max(self._steps, 1)
        tokens_per_s = self._tokens / seconds
        total = self._tokens * self.flops_per_token
        total -= self._without_logits * self.head_flops_per_token
        flops = total / seconds / self.devices
        self._seconds, self._tokens, self._without_logits, self._steps = 0.0, 0, 0.0, 0
        return {
            "tokens_per_s": tokens_per_s,
            "step_time_s": seconds / steps,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak_flops,
            "hfu": flops * self.hardware_factor / self.peak_flops,
        }
