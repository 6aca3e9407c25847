"""Throughput, duration, cost and energy of a training run from its step time.

Does not predict times.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.terms import Column, term


@term("devices", "dp x tp x pp x cp")
def devices(dp: Column, tp: Column, pp: Column, cp: Column) -> Column:
    """Devices of the plan."""
    return np.asarray(dp * tp * pp * cp)


@term("tokens", "global_batch x seq_len")
def step_tokens(global_batch: Column, seq_len: Column) -> Column:
    """Tokens per step."""
    return np.asarray(global_batch * seq_len)


@term("tokens/s", "step_tokens / step_time_s / devices")
def tokens_per_s_per_device(step_tokens: Column, step_time_s: Column, devices: Column) -> Column:
    """Throughput per device."""
    return np.asarray(step_tokens / step_time_s / devices)


@term("USD", "10^9 tokens / tokens_per_s_per_device / 3600 x usd_per_hour")
def usd_per_billion_tokens(tokens_per_s_per_device: Column, usd_per_hour: Column) -> Column:
    """Cost per 10^9 tokens."""
    return np.asarray(1e9 / tokens_per_s_per_device / 3600 * usd_per_hour)


@term(
    "kWh",
    "10^9 tokens / tokens_per_s_per_device / 3600 x power_w / 1000",
    "board power from the catalogue, without cooling",
)
def kwh_per_billion_tokens(tokens_per_s_per_device: Column, power_w: Column) -> Column:
    """Energy per 10^9 tokens."""
    return np.asarray(1e9 / tokens_per_s_per_device / 3600 * power_w / 1000)


@term("days", "tokens / (tokens_per_s_per_device x devices) / 86400")
def days(tokens: Column, tokens_per_s_per_device: Column, devices: Column) -> Column:
    """Days to train the requested tokens."""
    return np.asarray(tokens / (tokens_per_s_per_device * devices) / 86400)
