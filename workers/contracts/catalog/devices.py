"""The device catalogue: peaks, memory, links, power and typical price of each known accelerator.

Datasheet figures, dense (without sparsity). Does not depend on measured efficiencies.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import Field

from workers.contracts.base import Contract, Refused
from workers.contracts.catalog.units import GIB

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
# precisions that represent all numbers of a precision, nearest first
_REPRESENTED_BY = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "fp32": ("fp32",),
}


class Device(Contract):
    """One device: dense peaks in TFLOP/s, bandwidths in GB/s (10^9) per device and direction.

    `fp32` is the peak without tensor cores, `tf32` that of tensor cores on fp32 operands.
    `usd_per_hour` is a typical on-demand price in 2025, only for comparing plans.
    """

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    peak_tflops: dict[str, float]
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_gb_per_s: Annotated[float, Field(gt=0)]
    intra_node_gb_per_s: Annotated[float, Field(gt=0)]
    inter_node_gb_per_s: Annotated[float, Field(gt=0)]
    power_w: Annotated[float, Field(gt=0)]
    usd_per_hour: Annotated[float, Field(ge=0)]
    source: str
    match: tuple[str, ...] = ()

    def supports(self, precision: str) -> bool:
        """Whether the device multiplies natively in this precision."""
        return precision in self.peak_tflops

    @property
    def half(self) -> str:
        """The native 16-bit precision, bf16 before fp16; fp32 if it has neither."""
        return next((name for name in ("bf16", "fp16") if self.supports(name)), "fp32")

    def peak(self, precision: str) -> float:
        """Dense TFLOP/s in `compute_precision(precision)`."""
        return self.peak_tflops[self.compute_precision(precision)]

    def compute_precision(self, precision: str) -> str:
        """The precision that products are computed in: native, or the nearest wider one.

        bf16 has the exponents of fp32, so fp16 cannot replace it; all represent fp8. A device
        described without fp32 computes in its widest precision. Raises Refused.
        """
        if precision not in _REPRESENTED_BY:
            raise Refused(
                f"{precision!r} is not a precision",
                f"Use one of {', '.join(reversed(_REPRESENTED_BY))}.",
            )
        known = [name for name in _REPRESENTED_BY[precision] if name in self.peak_tflops]
        return (
            known[0]
            if known
            else next(name for name in reversed(_REPRESENTED_BY) if name in self.peak_tflops)
        )


def _gpu(
    name: str,
    gib: float,
    bandwidth: float,
    links: tuple[float, float],
    power: float,
    usd: float,
    source: str,
    match: tuple[str, ...],
    **peaks: float,
) -> Device:
    return Device(
        name=name,
        peak_tflops=peaks,
        memory_bytes=int(gib * GIB),
        memory_gb_per_s=bandwidth,
        intra_node_gb_per_s=links[0],
        inter_node_gb_per_s=links[1],
        power_w=power,
        usd_per_hour=usd,
        source=source,
        match=match,
    )


_HOPPER = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_VOLTA = {"fp32": 15.7, "fp16": 125.0}
_B200_GIB = 192e9 / GIB  # the 192 GB of Blackwell are decimal: nvidia-smi shows 179 GiB

_ALL = (
    _gpu(
        "v100-16g",
        16,
        900,
        (150, 12.5),
        300,
        1.5,
        "NVIDIA V100 datasheet (SXM2)",
        ("V100", "16GB"),
        **_VOLTA,
    ),
    _gpu(
        "v100-32g",
        32,
        900,
        (150, 12.5),
        300,
        1.8,
        "NVIDIA V100 datasheet (SXM2)",
        ("V100", "32GB"),
        **_VOLTA,
    ),
    _gpu(
        "a100-40g",
        40,
        1555,
        (300, 25),
        400,
        1.4,
        "NVIDIA A100 datasheet (SXM4)",
        ("A100", "40GB"),
        **_AMPERE,
    ),
    _gpu(
        "a100-80g",
        80,
        2039,
        (300, 25),
        400,
        1.8,
        "NVIDIA A100 datasheet (SXM4)",
        ("A100", "80GB"),
        **_AMPERE,
    ),
    _gpu(
        "a800-80g",
        80,
        2039,
        (200, 25),
        400,
        1.7,
        "NVIDIA A800 datasheet (SXM4)",
        ("A800",),
        **_AMPERE,
    ),
    _gpu(
        "h100-pcie-80g",
        80,
        2000,
        (64, 50),
        350,
        2.4,
        "NVIDIA H100 datasheet (PCIe)",
        ("H100", "PCIe"),
        fp32=51.2,
        tf32=378.0,
        bf16=756.5,
        fp16=756.5,
        fp8=1513.0,
    ),
    _gpu(
        "h100-96g",
        96,
        2400,
        (450, 50),
        500,
        2.8,
        "H100 SXM peaks; 96 GB HBM2e at 500 W as in torchtitan's reports",
        ("H100", "96GB"),
        **_HOPPER,
    ),
    _gpu(
        "h100-80g",
        80,
        3350,
        (450, 50),
        700,
        3.0,
        "NVIDIA H100 datasheet (SXM5)",
        ("H100",),
        **_HOPPER,
    ),
    _gpu(
        "h800-80g",
        80,
        3350,
        (200, 50),
        700,
        2.8,
        "NVIDIA H800 datasheet (SXM5)",
        ("H800",),
        **_HOPPER,
    ),
    _gpu(
        "h20-96g",
        96,
        4000,
        (450, 50),
        400,
        1.5,
        "NVIDIA H20 datasheet",
        ("H20",),
        fp32=44.0,
        tf32=74.0,
        bf16=148.0,
        fp16=148.0,
        fp8=296.0,
    ),
    _gpu(
        "h200-141g",
        141,
        4800,
        (450, 50),
        700,
        3.8,
        "NVIDIA H200 datasheet (SXM5)",
        ("H200",),
        **_HOPPER,
    ),
    _gpu(
        "gb200-192g",
        _B200_GIB,
        8000,
        (900, 50),
        1200,
        6.5,
        "NVIDIA GB200 NVL72 datasheet, per GPU",
        ("GB200",),
        fp32=80.0,
        tf32=1250.0,
        bf16=2500.0,
        fp16=2500.0,
        fp8=5000.0,
    ),
    _gpu(
        "b200-192g",
        _B200_GIB,
        8000,
        (900, 50),
        1000,
        5.5,
        "NVIDIA DGX B200 datasheet, per GPU",
        ("B200",),
        fp32=75.0,
        tf32=1125.0,
        bf16=2250.0,
        fp16=2250.0,
        fp8=4500.0,
    ),
    _gpu(
        "l40s-48g",
        48,
        864,
        (32, 12.5),
        350,
        1.0,
        "NVIDIA L40S datasheet",
        ("L40S",),
        fp32=91.6,
        tf32=183.0,
        bf16=362.0,
        fp16=362.0,
        fp8=733.0,
    ),
    _gpu(
        "rtx4090-24g",
        24,
        1008,
        (32, 3.125),
        450,
        0.45,
        "NVIDIA Ada GPU architecture paper, appendix A (fp32 sums)",
        ("4090",),
        fp32=82.6,
        tf32=82.6,
        bf16=165.2,
        fp16=165.2,
        fp8=330.3,
    ),
    _gpu(
        "mi300x-192g",
        192,
        5300,
        (448, 50),
        750,
        2.5,
        "AMD Instinct MI300X datasheet (7 Infinity Fabric links)",
        ("MI300X",),
        fp32=163.4,
        tf32=653.7,
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
    ),
    Device(
        # fp16 is multiplied in fp32, by the engine and by what measures a node's peak
        name="cpu",
        kind="cpu",
        peak_tflops={"fp32": 0.22, "bf16": 0.4, "fp16": 0.22},
        memory_bytes=4 * GIB,
        memory_gb_per_s=20.0,
        intra_node_gb_per_s=2.0,
        inter_node_gb_per_s=1.25,
        power_w=15.0,
        usd_per_hour=0.04,
        source="nominal: products of 512 x 512 by oneDNN on one core of a Zen 5 server (512-bit "
        "units); a node "
        "measures its own peak",
    ),
)

DEVICES: dict[str, Device] = {device.name: device for device in _ALL}


def device(name: str) -> Device:
    """The entry of that name. Raises Refused naming the nearest entries."""
    try:
        return DEVICES[name]
    except KeyError:
        near = difflib.get_close_matches(name, DEVICES, n=3, cutoff=0.3) or sorted(DEVICES)
        raise Refused(
            f"{name!r} is not in the device catalogue", f"Use {' or '.join(near)}."
        ) from None


def check_device(name: str) -> str:
    """The name itself. Raises Refused if it is not in the catalogue."""
    return device(name).name


def identify(product: str, memory_bytes: int) -> str | None:
    """Catalogue name for a driver's product name (`NVIDIA H100 80GB HBM3`) and memory, or None."""
    plain = product.upper().replace(" ", "").replace("-", "")
    best: tuple[float, str] | None = None
    for entry in _ALL:
        families = [word.upper() for word in entry.match if not word.endswith("GB")]
        # B200 is inside GB200, H100 PCIe inside H100: catalogue order puts the narrower name first
        if not families or not all(word in plain for word in families):
            continue
        if abs(memory_bytes - entry.memory_bytes) > 0.12 * entry.memory_bytes:
            continue
        distance = abs(memory_bytes - entry.memory_bytes) / entry.memory_bytes - 0.2 * len(families)
        if best is None or distance < best[0]:
            best = (distance, entry.name)
    return best[1] if best else None
