"""Published statistics of two GPU clusters, from which synthetic traces are drawn.

Philly: Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads",
USENIX ATC 2019. Helios: Hu et al., "Characterization and Prediction of Deep Learning Workloads in
Large-Scale GPU Datacenters", SC 2021. The quantiles of both and the shares by size are those that
Hu et al., "Characterization of Large Language Model Development in the Datacenter", NSDI 2024,
publish next to their own trace (figures of github.com/InternLM/AcmeTrace); the arrivals by hour are
from github.com/S-Lab-System-Group/HeliosArtifact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class TraceStatistics:
    """Distribution of the durations, and shares of runs and of device time by devices per run."""

    mean_s: float
    quantiles: Mapping[float, float]  # probability → seconds
    devices: tuple[int, ...]  # the largest size of each class
    runs: tuple[float, ...]  # share of runs per class
    device_time: tuple[float, ...]  # share of device time per class
    teams: int
    users: int


STATISTICS: Final[Mapping[str, TraceStatistics]] = {
    "philly": TraceStatistics(
        mean_s=18_006,
        quantiles={0.25: 105, 0.5: 874, 0.75: 3162, 0.9: 15_700, 0.99: 413_000},
        # the largest run had 128 devices; the shares above 32 are below the figures' resolution
        devices=(1, 2, 4, 8, 16, 32, 64, 128),
        runs=(0.83, 0.02, 0.08, 0.07, 0.009, 0.002, 0.0003, 0.0001),
        device_time=(0.17, 0.03, 0.19, 0.50, 0.09, 0.03, 0.009, 0.006),
        teams=14,
        users=319,
    ),
    "helios": TraceStatistics(
        mean_s=6652,
        quantiles={0.25: 63, 0.5: 206, 0.75: 988, 0.9: 6900, 0.99: 142_000},
        devices=(1, 2, 4, 8, 16, 32, 64),
        runs=(0.72, 0.03, 0.06, 0.14, 0.03, 0.02, 0.005),
        device_time=(0.06, 0.02, 0.05, 0.29, 0.20, 0.25, 0.11),
        teams=27,
        users=300,
    ),
}

SHORTEST_S: Final = 5.0  # at probability 0

# arrivals per hour of the day over their mean (Helios)
ARRIVALS: Final = (
    *(0.90, 0.84, 0.68, 0.60, 0.56, 0.56, 0.55, 0.51, 0.56, 0.82, 1.12, 1.24),
    *(1.20, 1.22, 1.33, 1.43, 1.49, 1.33, 1.10, 1.20, 1.31, 1.22, 1.14, 1.09),
)

# a user's share of the runs falls as rank^−this: the top 5% of users have about half (Helios)
USER_EXPONENT: Final = 1.1
# teams have members in proportion to rank^−this
TEAM_EXPONENT: Final = 0.8
