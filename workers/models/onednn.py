"""Whether fp32 products are better done by oneDNN than by MKL on this CPU. Knows no models."""

from __future__ import annotations

from pathlib import Path

import torch


def onednn_pays(operator: str) -> bool:
    """MKL picks its kernels by the maker's name: Intel's own with AVX-512, others' without.
    `operator` is torch's own
    (`torch.ops.mkldnn`) that is to multiply; a torch without it stays with MKL."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(
        torch.ops.mkldnn, operator
    ):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
