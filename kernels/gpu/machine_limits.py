"""The machine's measured limits: copy, L2 and matrix product rates.

Datasheet values exceed what any kernel reaches, so fractions refer to these limits. Does not depend
on any operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu.timing import Timer


@dataclass(frozen=True)
class Limits:
    """Bytes per second of HBM (read plus written) and L2 (read), FLOPs per second of bf16 and FP8
    products.
    """

    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None

    def fraction(self, bound: str, bytes_moved: int, flops: int, seconds: float) -> float | None:
        """Share of the limit that was reached; None for a bound without a measured limit (shared
        memory).
        """
        if bound == "hbm":
            return bytes_moved / seconds / self.hbm_bytes_per_s
        if bound == "l2":
            return bytes_moved / seconds / self.l2_bytes_per_s
        ceilings = {"tensor": self.bf16_flops_per_s, "fp8": self.fp8_flops_per_s}
        ceiling = ceilings.get(bound)
        return None if ceiling is None else flops / seconds / ceiling


def measure(device: torch.device, timer: Timer) -> Limits:
    """Copies 2 GiB, reads 16 MiB repeatedly, multiplies 8192 x 8192 random matrices."""
    big = torch.empty(2**31, dtype=torch.int8, device=device).random_(0, 100)
    other = torch.empty_like(big)
    small = torch.randn(2**22, device=device)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def read_again() -> None:
        for _ in range(64):
            small.sum()

    times = timer.together(
        {
            "copy": lambda: other.copy_(big),
            "l2": read_again,
            "bf16": lambda: torch.mm(a, b, out=out),
        },
        round_s=0.25,
    )
    flops = 2 * 8192**3
    return Limits(
        hbm_bytes_per_s=2 * big.numel() / times["copy"].ms * 1e3,
        l2_bytes_per_s=64 * small.numel() * 4 / times["l2"].ms * 1e3,
        bf16_flops_per_s=flops / times["bf16"].ms * 1e3,
        fp8_flops_per_s=_fp8(device, timer, flops),
    )


def _fp8(device: torch.device, timer: Timer, flops: int) -> float | None:
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    a = torch.randn(8192, 8192, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(8192, 8192, device=device).to(torch.float8_e4m3fn).t()
    unit_scale = torch.ones((), device=device)
    try:
        times = timer.together(
            {
                "fp8": lambda: torch._scaled_mm(
                    a, b, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16
                )
            },
            round_s=0.1,
        )
    except Exception:  # a private function, which may change: the run continues without this limit
        return None
    return flops / times["fp8"].ms * 1e3
