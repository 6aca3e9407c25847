"""Readings of the node itself: power from energy counters, RDMA ports, psutil's values."""

from __future__ import annotations

from pathlib import Path

from workers.agent.node_counters import NodeCounters
from workers.contracts.wire.field_versions import message_for
from workers.contracts.wire.node_messages import Heartbeat
from workers.contracts.wire.versions import FIRST


def zone(sys: Path, name: str, label: str, energy: int, most: int = 10**9) -> Path:
    folder = sys / "class" / "powercap" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_power_is_the_energy_between_two_samples(tmp_path: Path) -> None:
    times = iter([10.0, 12.0, 14.0, 16.0])
    counters = NodeCounters(sys=tmp_path, now=lambda: next(times))
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    memory = zone(tmp_path, "intel-rapl:0:0", "dram", 10**9 - 1_000_000)
    zone(tmp_path, "intel-rapl:0:1", "core", 7)  # a part of the package
    zone(tmp_path, "intel-rapl:1", "psys", 7)  # the whole machine
    assert counters.sample().power_w is None  # one reading says nothing
    zone(tmp_path, "intel-rapl:0", "package-0", 200_000_000)
    zone(tmp_path, "intel-rapl:0:0", "dram", 9_000_000)  # wrapped after 1 J
    assert counters.sample().power_w == 105.0
    (memory / "energy_uj").unlink()
    assert counters.sample().power_w is None  # a part would be too low
    zone(tmp_path, "intel-rapl:0:0", "dram", 9_000_000)
    assert counters.sample().power_w is None


def test_rdma_counters_are_in_words_of_four_bytes(tmp_path: Path) -> None:
    for card in ("mlx5_0", "mlx5_1"):
        folder = tmp_path / "class" / "infiniband" / card / "ports" / "1" / "counters"
        folder.mkdir(parents=True)
        (folder / "port_rcv_data").write_text("1000\n")
        (folder / "port_xmit_data").write_text("250\n")
    sample = NodeCounters(sys=tmp_path).sample()
    assert (sample.rdma_received_bytes, sample.rdma_sent_bytes) == (8000, 2000)


def test_this_machine_reports_real_values(tmp_path: Path) -> None:
    sample = NodeCounters(sys=tmp_path).sample()
    assert sample.memory_used_bytes is not None and sample.memory_used_bytes > 2**20
    assert sample.cpu_utilization is not None and 0 <= sample.cpu_utilization <= 1
    assert (sample.power_w, sample.rdma_sent_bytes) == (None, None)
    beat = Heartbeat(node="n1", time=1.0, machine=sample)
    assert "machine" not in message_for(beat, FIRST)  # release 0.1 refuses unknown fields
