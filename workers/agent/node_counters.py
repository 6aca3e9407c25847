"""Readings of the node itself: CPU, memory, temperature, network and RDMA counters, CPU power.

Power is the difference of the kernel's energy counters (RAPL) between two samples; most systems let
only root read them. What cannot be read is left out, never guessed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from workers.contracts.wire.node_messages import NodeSample

SYS: Final = Path("/sys")
# sensors of CPUs by the names of their drivers: Intel, AMD, ARM and others
_CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")
# interfaces whose traffic is within the node, or counted at the interface that they belong to
_INNER: Final = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "tun")
_RDMA_WORD: Final = 4  # port counters of InfiniBand are in units of 4 bytes
_RAPL_ZONES: Final = ("package", "dram")  # `psys` and `core` overlap with packages


class NodeCounters:
    """Samples of one node; the first has no power, as it needs two readings."""

    def __init__(self, *, sys: Path = SYS, now: Callable[[], float] = time.monotonic) -> None:
        self._sys, self._now = sys, now
        self._energy: tuple[float, dict[Path, int]] | None = None
        psutil.cpu_percent(None)  # the first call returns 0

    def sample(self) -> NodeSample:
        """The readings of now."""
        received, sent = self._network()
        rdma_received, rdma_sent = self._rdma()
        return NodeSample(
            cpu_utilization=round(psutil.cpu_percent(None) / 100, 4),
            memory_used_bytes=_memory_used(),
            power_w=self._power(),
            temperature_c=_temperature(),
            received_bytes=received,
            sent_bytes=sent,
            rdma_received_bytes=rdma_received,
            rdma_sent_bytes=rdma_sent,
        )

    def _power(self) -> float | None:
        """Mean watts since the last sample; None unless each zone can be read."""
        zones = {path: _integer(path / "energy_uj") for path in self._zones()}
        counters = {path: value for path, value in zones.items() if value is not None}
        before, now = self._energy, self._now()
        self._energy = (now, counters) if counters and len(counters) == len(zones) else None
        if before is None or self._energy is None or set(before[1]) != set(counters):
            return None
        seconds, micro_joules = now - before[0], 0
        for path, value in counters.items():
            used = value - before[1][path]
            if used < 0:  # the counter has wrapped
                used += _integer(path / "max_energy_range_uj") or 0
            if used < 0:
                return None
            micro_joules += used
        return round(micro_joules / 1e6 / seconds, 2) if seconds > 0 else None

    def _zones(self) -> list[Path]:
        root = self._sys / "class" / "powercap"
        with contextlib.suppress(OSError):
            return [
                path
                for path in sorted(root.glob("intel-rapl:*"))
                if _text(path / "name").startswith(_RAPL_ZONES)
            ]
        return []

    def _network(self) -> tuple[int | None, int | None]:
        """Bytes received and sent by the interfaces that connect the node to others."""
        counters: dict[str, Any] = {}
        with contextlib.suppress(OSError, RuntimeError):
            counters = psutil.net_io_counters(pernic=True)
        outer = [nic for name, nic in counters.items() if not self._is_inner(name)]
        if not outer:
            return None, None
        return sum(nic.bytes_recv for nic in outer), sum(nic.bytes_sent for nic in outer)

    def _is_inner(self, name: str) -> bool:
        """Whether another interface counts its traffic too: bonds repeat that of their members."""
        bond = self._sys / "class" / "net" / name / "bonding"
        return name.startswith(_INNER) or bond.exists()

    def _rdma(self) -> tuple[int | None, int | None]:
        ports = [*(self._sys / "class" / "infiniband").glob("*/ports/*/counters")]
        return (
            _total(port / "port_rcv_data" for port in ports),
            _total(port / "port_xmit_data" for port in ports),
        )


def _total(paths: Iterable[Path]) -> int | None:
    """The sum of the readable counters in bytes; None without one."""
    values = [value for path in paths if (value := _integer(path)) is not None]
    return sum(values) * _RDMA_WORD if values else None


def _memory_used() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def _temperature() -> float | None:
    """The hottest CPU sensor in °C; None without one."""
    read = getattr(psutil, "sensors_temperatures", None)  # not on every system
    sensors: dict[str, Any] = {}
    with contextlib.suppress(OSError, RuntimeError):
        sensors = read() if read is not None else {}
    readings = [
        float(one.current)
        for name in _CPU_SENSORS
        for one in sensors.get(name, ())
        if one.current is not None
    ]
    return max(readings, default=None)


def _integer(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
