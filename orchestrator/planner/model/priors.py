"""Effects of common hardware limits, device generations and frameworks on the time parameters.

Combines effects to the values of a framework and device. `calibration.hierarchy` fits effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.model.generations import generation
from orchestrator.planner.model.prior_values import BIASES, LOG_ERROR, PEERS, UNITS
from workers.contracts.catalog.devices import Device

_A100_TFLOPS_PER_W = 312 / 400


def peer_key(device: Device, precision: str) -> str:
    """Generation and precision of products (fp32, half or fp8), as in PEERS."""
    used = device.compute_precision(precision)
    return f"{generation(device)} {'half' if used in ('bf16', 'fp16') else used}"


def best_peer_mfu(device: Device, precision: str) -> float:
    """The best published MFU on the device's generation; infinite if none is published."""
    return PEERS.get(peer_key(device, precision), math.inf)


def power_density(device: Device) -> float:
    """Log of the 16-bit peak per watt, relative to an A100; 0 for a CPU.

    More peak per watt means a lower clock under load: an A100 can use 0.78 TFLOP/s per watt, an
    H100 1.41 (1.98 at 500 W), a B200 2.25.
    """
    if device.kind == "cpu" or device.power_w <= 0:
        return 0.0
    return math.log(device.peak(device.half) / device.power_w / _A100_TFLOPS_PER_W)


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
        return {
            name: math.exp(
                value + density * trend.get(name, 0.0) + sum(each.get(name, 0.0) for each in own)
            )
            for name, value in common.items()
        }


PUBLISHED = Effects(UNITS, BIASES)
"""Effects fitted to all published runs together."""


__all__ = ["LOG_ERROR", "PUBLISHED", "Effects", "best_peer_mfu", "power_density", "unit_names"]
