"""Whether oneDNN computes fp32 products faster than MKL on this CPU."""

from __future__ import annotations

from pathlib import Path

import torch


def onednn_pays(operator: str) -> bool:
    """Whether to multiply with `operator` of `torch.ops.mkldnn` instead of MKL.

    MKL uses AVX-512 on Intel CPUs only, so oneDNN is faster on AMD CPUs that have it.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(
        torch.ops.mkldnn, operator
    ):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
