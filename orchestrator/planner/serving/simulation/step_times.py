"""Seconds of one engine step, by its prompt tokens, decoding sequences and context.

Either from the serving terms (roofline) or linear from costs that a server measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from workers.contracts.wire.serving_reports import StepCosts


@dataclass(slots=True)
class StepWork:
    """The work of a step.

    `prefill_tokens` of prompts, `decodes` sequences with one token each, `samples` sequences that
    get a next token. `decode_context` and `prefill_context` are cached tokens that their queries
    read, each query counted; `cached_tokens` are distinct cached tokens read.
    """

    prefill_tokens: int = 0
    decodes: int = 0
    samples: int = 0
    decode_context: float = 0.0
    prefill_context: float = 0.0
    cached_tokens: float = 0.0

    def add_prefill(self, start: int, count: int, *, completes: bool) -> None:
        """Add `count` tokens of a prompt after `start` cached ones."""
        self.prefill_tokens += count
        self.samples += completes
        self.prefill_context += count * start + count * (count + 1) / 2
        self.cached_tokens += start

    def add_decode(self, context: float) -> None:
        """Add the next token of a sequence with `context` tokens, that one included."""
        self.decodes += 1
        self.samples += 1
        self.decode_context += context
        self.cached_tokens += context


class StepTimes(Protocol):
    """Predicts the duration of a step."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of the step."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredStepTimes:
    """Linear in a server's measured costs."""

    costs: StepCosts

    def seconds(self, work: StepWork) -> float:
        """Seconds of the step, at least 10 µs."""
        costs = self.costs
        return max(
            1e-5,
            costs.step_s
            + costs.prefill_token_s * work.prefill_tokens
            + costs.decode_s * work.decodes
            + costs.prefill_context_s * work.prefill_context
            + costs.decode_context_s * work.decode_context,
        )


class RooflineStepTimes:
    """max(compute, memory) + communication + launches, with the columns of the serving terms.

    Sources: those of `serving/speed_terms`; each step is one forward pass over its tokens (Orca,
    OSDI 2022).
    """

    def __init__(self, columns: Mapping[str, Any], weights_bytes: float) -> None:
        get = {
            key: float(value) for key, value in columns.items() if isinstance(value, int | float)
        }
        embedding, head = get["params_embedding"], get["params_head"]
        self._head_flops = 2 * (head or embedding)
        self._body_flops = 2 * (get["params_active"] - embedding - head)
        self._attention_flops = 4 * get["layers"] * get["attention_width"]
        self._rate = get["gemm_efficiency"] * get["peak_flops"] * get["tp"]
        self._bandwidth = get["bandwidth_efficiency"] * get["memory_bandwidth"]
        self._weights = weights_bytes
        self._table = embedding * max(2.0, get["weight_bytes_each"]) if head else 0.0
        self._experts, self._top_k = get["experts"], get["top_k"]
        self._expert_bytes = get["moe_layers"] * get["params_expert"] * get["weight_bytes_each"]
        self._tp, self._layers = get["tp"], get["layers"]
        self._window = get["window"]
        self._launch_s = get["layers"] * get["launch_s_per_layer"]
        self._token_bytes = get["hidden"] * get["activation_bytes_each"]
        self._tp_bandwidth, self._latency_s = get["tp_bandwidth"], get["collective_latency_s"]
        heads = 1.0 if get["is_mla"] or get["is_mfa"] else min(get["tp"], get["kv_heads"])
        elements = (
            get["kv_lora"] + get["qk_rope"]
            if get["is_mla"]
            else (2 * get["head_dim"] if get["is_mfa"] else 2 * get["kv_heads"] * get["head_dim"])
        )
        self._kv_bytes = get["layers"] * elements * get["kv_bytes_each"] / heads

    def seconds(self, work: StepWork) -> float:
        """Seconds of the step."""
        tokens = work.prefill_tokens + work.decodes
        flops = (
            self._body_flops * tokens
            + self._head_flops * work.samples
            + self._attention_flops * (work.prefill_context + work.decode_context)
        )
        weights = self._weights - self._table - self._idle_expert_bytes(tokens)
        memory = (weights / self._tp + work.cached_tokens * self._kv_bytes) / self._bandwidth
        return max(flops / self._rate, memory) + self._communication_s(tokens) + self._launch_s

    def _idle_expert_bytes(self, tokens: int) -> float:
        """Weights of experts that no token uses, by even routing: E · (1 - k/E)^tokens of them."""
        if not self._experts:
            return 0.0
        unused = (1 - min(1.0, self._top_k / self._experts)) ** tokens
        return float(self._expert_bytes * self._experts * unused)

    def _communication_s(self, tokens: int) -> float:
        if self._tp == 1:
            return 0.0
        sent = 2 * (self._tp - 1) / self._tp * tokens * self._token_bytes
        return 2 * self._layers * (sent / self._tp_bandwidth + self._latency_s)
