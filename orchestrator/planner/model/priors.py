"""Effects of common hardware limits, device generations and frameworks on the time parameters.

Combines effects to the values of a framework and device. `calibration.hierarchy` fits effects;
what datasheets and papers on kernels state enters as offsets, which are not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
# beyond the fitted devices, the trend is as likely to end as to continue: half of it is the error
_OUTSIDE_SPREAD = 0.5 * abs(POWER_TREND)
# the largest published share of the peak that bf16 products of the best shape reached: 267.9 of 312
# TFLOP/s of an A100 (stas00/ml-engineering, compute/accelerator, Maximum Achievable Matmul FLOPS)
LARGEST_GEMM_SHARE = 0.86
# log power per FLOP/s within which devices bound each other; their efficiencies differ by less than
# 5% (POWER_TREND). A GB200 has 8% more than a B200, of the same silicon
_SAME_POWER = 0.1

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
    # Transformer Engine calls cuDNN: half of an H100 (head dim 128, causal mask; arXiv
    # 2407.08608, figure 5), and 1/1.3 of FlashAttention 4's 71% of a B200 (arXiv 2603.05451), less
    # its backward pass
    ("megatron", "hopper"): (0.5, _H100),
    ("megatron", "blackwell"): (0.5, _B200),
}


def peer_key(device: Device, precision: str) -> str:
    """Device and precision of products (fp32, half or fp8), as in PEERS."""
    used = device.compute_precision(precision)
    return f"{device.name} {'half' if used in ('bf16', 'fp16') else used}"


def best_mfu_of(peers: Mapping[str, float], device: Device, precision: str) -> float:
    """The best MFU in `peers` that bounds the device; infinite if none does.

    Peers are devices of the same generation with at least about as much power per peak FLOP/s. A
    device with less, such as an H100 at 500 W, does not bound one at 700 W. Without such a peer,
    the best of all devices at that precision bounds a GPU.
    """
    kind = peer_key(device, precision).rpartition(" ")[2]
    bounds, others = list[float](), list[float]()
    for key, value in peers.items():
        name, _, precision_of_peer = key.rpartition(" ")
        peer = device if name == device.name else DEVICES.get(name)
        if peer is None or precision_of_peer != kind or peer.kind != device.kind:
            continue
        others.append(value)
        if generation(peer) == generation(device) and (
            _log_density(peer) <= _log_density(device) + _SAME_POWER
        ):
            bounds.append(value)
    return max(bounds or others, default=math.inf)


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
    # to the devices that the papers measured, at most
    share = POWER_TREND * _within(_log_density(device), _KERNEL_DENSITIES)
    if kernel is not None:
        efficiency, per_watt = kernel
        share -= POWER_TREND * math.log(per_watt / _A100_TFLOPS_PER_W)
        share += math.log(efficiency / _ATTENTION_DEFAULT)
    return {
        "gemm_half_tokens": math.log(per_byte / _A100_FLOPS_PER_BYTE),
        "attention_efficiency": share,
    }


def power_density(device: Device, fitted: tuple[float, float] | None = None) -> float:
    """Log of the 16-bit peak per watt, relative to an A100; 0 for a CPU.

    More peak per watt means a lower clock under load: an A100 can use 0.78 TFLOP/s per watt, an
    H100 1.41 (1.98 at 500 W), a B200 2.25. Limited to the range of the fitted devices, because the
    trend does not continue beyond it: products of an H20 (0.37) are bound by other limits.
    """
    return _within(_log_density(device), FITTED_DENSITIES if fitted is None else fitted)


def densities_of(devices: Iterable[Device]) -> tuple[float, float]:
    """The range of `power_density` of devices with runs; (0, 0) without any GPU."""
    values = [_log_density(device) for device in devices if device.kind != "cpu"]
    return min(values, default=0.0), max(values, default=0.0)


def _log_density(device: Device) -> float:
    if device.kind == "cpu" or device.power_w <= 0:
        return 0.0
    return math.log(device.peak(device.half) / device.power_w / _A100_TFLOPS_PER_W)


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])


def unmeasured_error(framework: str, device: Device) -> float:
    """The log error of a pair without published runs.

    That of published sources predicted from all others; more if no run measured the generation or
    the framework either, by the prior spread of their effects on products; and more if the
    device's power per FLOP/s lies outside that of the fitted devices.
    """
    _, kind, engine, _ = unit_names(framework, device)
    unknown = [_GENERATION_SPREAD * (kind not in UNITS), _FRAMEWORK_SPREAD * (engine not in UNITS)]
    outside = abs(_log_density(device) - power_density(device))
    return math.hypot(LOG_ERROR, *unknown, _OUTSIDE_SPREAD * outside)


def unit_names(framework: str, device: Device) -> list[str]:
    """The units whose effects add up for a framework on a device, "common" first."""
    kind = generation(device)
    return ["common", f"generation:{kind}", f"framework:{framework}", f"pair:{framework}/{kind}"]


@dataclass(frozen=True)
class Effects:
    """Effects in log space: unit -> parameter -> value; "trend" multiplies `power_density`.

    `densities` is the range of `power_density` of the fitted devices.
    """

    units: Mapping[str, Mapping[str, float]]
    biases: Mapping[str, float]
    densities: tuple[float, float]

    @classmethod
    def of(
        cls,
        units: Sequence[str],
        names: Sequence[str],
        values: np.ndarray,
        biases: Mapping[str, float],
        densities: tuple[float, float],
    ) -> Effects:
        """From an array `(units, names)`, the sources' biases, and the fitted devices' range."""
        return cls(
            {
                unit: dict(zip(names, row.tolist(), strict=True))
                for unit, row in zip(units, values, strict=True)
            },
            biases,
            densities,
        )

    def values(self, framework: str, device: Device) -> dict[str, float]:
        """Parameter values of the framework on the device.

        Products reach at most the largest published share of the peak; `parameters.within_bounds`
        limits all values.
        """
        common = self.units["common"]
        trend = self.units.get("trend", {})
        density = power_density(device, self.densities)
        own = [self.units.get(name, {}) for name in unit_names(framework, device)[1:]]
        known = offsets(framework, device)
        values = {
            name: math.exp(
                value
                + known.get(name, 0.0)
                + density * trend.get(name, 0.0)
                + sum(each.get(name, 0.0) for each in own)
            )
            for name, value in common.items()
        }
        if "gemm_efficiency" in values:
            values["gemm_efficiency"] = min(values["gemm_efficiency"], LARGEST_GEMM_SHARE)
        return values


FITTED_DENSITIES: Final = densities_of(DEVICES[key.rpartition(" ")[0]] for key in PEERS)
_KERNEL_DENSITIES: Final = (
    math.log(_A100 / _A100_TFLOPS_PER_W),
    math.log(_B200 / _A100_TFLOPS_PER_W),
)

PUBLISHED = Effects(UNITS, BIASES, FITTED_DENSITIES)
"""Effects fitted to all published runs together."""


__all__ = [
    "LARGEST_GEMM_SHARE",
    "POWER_TREND",
    "PUBLISHED",
    "Effects",
    "best_mfu_of",
    "best_peer_mfu",
    "densities_of",
    "offsets",
    "peer_key",
    "power_density",
    "unit_names",
    "unmeasured_error",
]
