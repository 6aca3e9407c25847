"""SwiGLU in plain fp32 torch: the reference for the kernels; differentiable."""

from __future__ import annotations

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up (Shazeer 2020, eq. 6 without the projections), in fp32 or the input's
    fp64. gate, up and the result have one shape.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    return torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
