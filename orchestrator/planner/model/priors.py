"""Effects of common hardware limits, device generations and frameworks on the time parameters.

Combines effects to the values of a framework and device. `calibration.hierarchy` fits effects;
what datasheets and papers on kernels state enters as offsets, which are not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.model.generations import generation
from orchestrator.planner.model.prior_values import BIASES, LOG_ERROR, PEERS, UNITS
from workers.contracts.catalog.devices import DEVICES, Device

_A100_TFLOPS_PER_W = 312 / 400
_A100_FLOPS_PER_BYTE = 312e12 / 2.039e12
# prior spreads of effects on products, log: 0.15 of the parameter times 0.5 and 0.35 of the fit
_GENERATION_SPREAD, _FRAMEWORK_SPREAD = 0.075, 0.05
_ATTENTION_DEFAULT = 0.45  # of the parameter attention_efficiency
# log efficiency per log power density: products reach about 0.88 of the peak of an A100, 0.79 of
# an H200 and 0.6 of a B200
POWER_TREND = -0.45

# share of the 16-bit peak that a framework's fused attention reached when its authors measured it,
# and the TFLOP/s per watt of the measured device
_A100, _H100, _B200 = 312 / 400, 989 / 700, 2250 / 1000
_ATTENTION_KERNELS: dict[tuple[str, str], tuple[float, float]] = {
    # FlashAttention 1 reaches 25 to 40%, 2 reaches 50 to 73% of an A100 (arXiv 2307.08691)
    ("llm-foundry", "ampere"): (0.32, _A100),
    ("fsdp2", "ampere"): (0.55, _A100),
    # FlashAttention 2 reaches 35% of an H100 (arXiv 2407.08608)
    ("llm-foundry", "hopper"): (0.35, _H100),
    ("fsdp2", "hopper"): (0.35, _H100),
    # Transformer Engine calls cuDNN: half of an H100 (arXiv 2407.08608, figure 5), and 1/1.3 of
    # FlashAttention 4's 71% of a B200 (arXiv 2603.05451), less its backward pass
    ("megatron", "hopper"): (0.5, _H100),
    ("megatron", "blackwell"): (0.5, _B200),
}


def peer_key(device: Device, precision: str) -> str:
    """Device and precision of products (fp32, half or fp8), as in PEERS."""
    used = device.compute_precision(precision)
    return f"{device.name} {'half' if used in ('bf16', 'fp16') else used}"


def best_mfu_of(peers: Mapping[str, float], device: Device, precision: str) -> float:
    """The best MFU in `peers` that bounds the device; infinite if none does.

    Peers are devices of the same generation with at least as much power per peak FLOP/s. A device
    with less, such as an H100 at 500 W, does not bound one at 700 W.
    """
    kind = peer_key(device, precision).rpartition(" ")[2]
    bounds = [math.inf]
    for key, value in peers.items():
        name, _, precision_of_peer = key.rpartition(" ")
        peer = device if name == device.name else DEVICES.get(name)
        if peer is None or precision_of_peer != kind or generation(peer) != generation(device):
            continue
        if power_density(peer) <= power_density(device) + 1e-6:
            bounds.append(value)
    return max(bounds[1:], default=math.inf)


def best_peer_mfu(device: Device, precision: str) -> float:
    """The best published MFU that bounds the device; infinite if none does."""
    return best_mfu_of(PEERS, device, precision)


def offsets(framework: str, device: Device) -> dict[str, float]:
    """Log of what datasheets and kernel papers say a parameter differs from the general default.

    A product of few tokens reads its weights from memory: it has half its speed at as many tokens
    as the device computes FLOPs per byte (roofline, doi 10.1145/1498765.1498785). Attention has the
    efficiency of its published kernel, corrected to the device's power.
    """
    if device.kind == "cpu" or device.memory_gb_per_s <= 0:
        return {}
    per_byte = device.peak(device.half) * 1e12 / (device.memory_gb_per_s * 1e9)
    kernel = _ATTENTION_KERNELS.get((framework, generation(device)))
    share = POWER_TREND * power_density(device)
    if kernel is not None:
        efficiency, per_watt = kernel
        share -= POWER_TREND * math.log(per_watt / _A100_TFLOPS_PER_W)
        share += math.log(efficiency / _ATTENTION_DEFAULT)
    return {
        "gemm_half_tokens": math.log(per_byte / _A100_FLOPS_PER_BYTE),
        "attention_efficiency": share,
    }


def power_density(device: Device) -> float:
    """Log of the 16-bit peak per watt, relative to an A100; 0 for a CPU.

    More peak per watt means a lower clock under load: an A100 can use 0.78 TFLOP/s per watt, an
    H100 1.41 (1.98 at 500 W), a B200 2.25.
    """
    if device.kind == "cpu" or device.power_w <= 0:
        return 0.0
    return math.log(device.peak(device.half) / device.power_w / _A100_TFLOPS_PER_W)


def unmeasured_error(framework: str, device: Device) -> float:
    """The log error of a pair without published runs.

    That of published sources predicted from all others; more if no run measured the generation or
    the framework either, by the prior spread of their effects on products.
    """
    _, kind, engine, _ = unit_names(framework, device)
    unknown = [_GENERATION_SPREAD * (kind not in UNITS), _FRAMEWORK_SPREAD * (engine not in UNITS)]
    return math.hypot(LOG_ERROR, *unknown)


def unit_names(framework: str, device: Device) -> list[str]:
    """The units whose effects add up for a framework on a device, "common" first."""
    kind = generation(device)
    return ["common", f"generation:{kind}", f"framework:{framework}", f"pair:{framework}/{kind}"]


@dataclass(frozen=True)
class Effects:
    """Effects in log space: unit -> parameter -> value; "trend" multiplies `power_density`."""

    units: Mapping[str, Mapping[str, float]]
    biases: Mapping[str, float]

    @classmethod
    def of(
        cls,
        units: Sequence[str],
        names: Sequence[str],
        values: np.ndarray,
        biases: Mapping[str, float],
    ) -> Effects:
        """From an array `(units, names)`, and the bias of each source."""
        return cls(
            {
                unit: dict(zip(names, row.tolist(), strict=True))
                for unit, row in zip(units, values, strict=True)
            },
            biases,
        )

    def values(self, framework: str, device: Device) -> dict[str, float]:
        """Parameter values of the framework on the device, without bounds."""
        common = self.units["common"]
        trend = self.units.get("trend", {})
        density = power_density(device)
        own = [self.units.get(name, {}) for name in unit_names(framework, device)[1:]]
        known = offsets(framework, device)
        return {
            name: math.exp(
                value
                + known.get(name, 0.0)
                + density * trend.get(name, 0.0)
                + sum(each.get(name, 0.0) for each in own)
            )
            for name, value in common.items()
        }


PUBLISHED = Effects(UNITS, BIASES)
"""Effects fitted to all published runs together."""


__all__ = [
    "POWER_TREND",
    "PUBLISHED",
    "Effects",
    "best_mfu_of",
    "best_peer_mfu",
    "offsets",
    "peer_key",
    "power_density",
    "unit_names",
    "unmeasured_error",
]
