"""The catalogue finds a device by what its driver calls it, and a cluster fills in what is not
given.
"""

from __future__ import annotations

import pytest

from workers.contracts import ClusterSpec
from workers.contracts.catalog.devices import DEVICES, device, identify

MIB = 2**20


@pytest.mark.parametrize(
    ("product", "mib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie-80g"),
        ("NVIDIA H200", 143771, "h200-141g"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA B200", 183359, "b200-192g"),
        ("NVIDIA GB200", 189471, "gb200-192g"),
        ("Tesla V100-SXM2-16GB", 16384, "v100-16g"),
        ("Tesla V100-SXM2-32GB", 32768, "v100-32g"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090-24g"),
        ("NVIDIA L40S", 46068, "l40s-48g"),
        ("NVIDIA H20", 97871, "h20-96g"),
        ("Tesla T4", 15360, None),
    ],
)
def test_drivers_names_are_recognized(product: str, mib: int, name: str | None) -> None:
    assert identify(product, mib * MIB) == name


def test_every_entry_has_figures_for_every_precision() -> None:
    for entry in DEVICES.values():
        assert all(entry.peak(precision) > 0 for precision in ("fp32", "bf16", "fp16", "fp8")), (
            entry.name
        )
        assert entry.source
    assert device("h100-80g").peak("fp8") == pytest.approx(2 * 989.4, rel=1e-3)
    assert device("a100-80g").peak("fp8") == 312.0 and not device("a100-80g").supports("fp8")
    # only fp32 has bf16's range; fp8 fits into fp16
    volta = device("v100-16g")
    assert (volta.peak("bf16"), volta.compute_precision("bf16")) == (15.7, "fp32") and volta.peak(
        "fp8"
    ) == 125.0
    assert (volta.half, device("a100-40g").half) == ("fp16", "bf16")


def test_a_cluster_takes_the_catalogues_links_and_price_unless_specified() -> None:
    plain = ClusterSpec(device="h100-80g", nodes=4, devices_per_node=8)
    assert (plain.devices, plain.intra_gb_per_s, plain.usd_per_hour) == (32, 450, 3.0)
    reported = ClusterSpec(device="h100-80g", intra_node_gb_per_s=100.0, usd_per_device_hour=0.0)
    assert (reported.intra_gb_per_s, reported.inter_gb_per_s, reported.usd_per_hour) == (
        100.0,
        50,
        0.0,
    )
    with pytest.raises(ValueError, match="h100-80g"):
        ClusterSpec(device="h100-80")
