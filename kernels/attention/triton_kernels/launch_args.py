"""Launch arguments of the attention kernels: block shapes, constants, strides, number and order of
programs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.attention.spec import AttentionSpec, Bounds, head_dim
from kernels.attention.triton_kernels.configs import split_head_dim
from kernels.jit import UPCAST, cdiv

LOG2_E = 1.4426950408889634


def get_config(op: str, q: Tensor, v: Tensor, spec: AttentionSpec) -> dict[str, Any]:
    """The launch configuration of an attention kernel for this call."""
    return tuning.config(
        op,
        d=q.shape[-1],
        dv=v.shape[-1],
        head_dim=head_dim(q, v),  # as text: tables round integers up to powers of two
        wide=q.dtype is torch.float32,
        causal=spec.causal,
        window=spec.window > 0,
        softcap=spec.softcap > 0,
    )


def get_constants(
    q: Tensor, v: Tensor, spec: AttentionSpec, bounds: Bounds | None, chosen: dict[str, Any]
) -> dict[str, Any]:
    """The constexpr and launch options of an attention kernel."""
    (d_a, d_b), (v_a, v_b) = split_head_dim(q.shape[-1]), split_head_dim(v.shape[-1])
    return {
        "RAGGED": bounds is not None,
        "CAUSAL": spec.causal,
        "WINDOWED": spec.window > 0,
        "SOFTCAP": spec.softcap > 0,
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "DA": d_a,
        "DB": d_b,
        "VA": v_a,
        "VB": v_b,
        "BM": chosen["block_m"],
        "BN": chosen["block_n"],
        "UPCAST": UPCAST,
        "num_warps": chosen["num_warps"],
        "num_stages": chosen["num_stages"],
        **({"ONE_LOOP": chosen["one_loop"]} if "one_loop" in chosen else {}),
    }


def get_scalars(spec: AttentionSpec) -> tuple[int, float, float, float, float]:
    """window, scale, and in base 2: scale (1 if capped already) and the factors before and after
    the cap.
    """
    cap = spec.softcap
    if cap:
        return spec.window, spec.scale, 1.0, 2 * LOG2_E * spec.scale / cap, cap * LOG2_E
    return spec.window, spec.scale, spec.scale * LOG2_E, 0.0, 0.0


def get_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, sequence and head."""
    return x.stride(0), x.stride(1), x.stride(2)


def make_addressable(x: Tensor) -> Tensor:
    """The tensor, or a copy if its columns are not contiguous or a tile exceeds 32-bit offsets."""
    apart = x.stride(-1) != 1 and x.shape[-1] > 1
    return x.contiguous() if apart or abs(x.stride(1)) >= 1 << 23 else x


def count_tiles(x: Tensor, cu: Tensor | None, block: int) -> int:
    """Tiles of one lane; for a ragged batch the slots that contain them (`jit.ragged_tile`)."""
    return cdiv(x.shape[1], block) if cu is None else x.shape[1] // block + len(cu) - 1


def choose_splits(programs: int, group: int, device: torch.device) -> int:
    """Number of sums, a divisor of the group, over which the query heads of a key-value head are
    split.

    It gives at least two programs per multiprocessor if one key-value head serves many query heads
    (MQA) and the batch is small.
    """
    needs_grad = 2 * runtime.sm_count(device)
    return next(
        (n for n in range(1, group) if group % n == 0 and programs * n >= needs_grad), group
    )


def choose_section(a: Tensor, b: Tensor, lanes: int, heads: int, bounds: Bounds | None) -> int:
    """Lanes whose streamed tensors together fit half of the L2 cache, a multiple of those that
    share a head.
    """
    length = max(bounds.max_q, bounds.max_k) if bounds else a.shape[1]
    bytes_each = max(1, length * (a.shape[-1] + b.shape[-1]) * a.element_size())
    sharing = max(1, heads // a.shape[2])
    at_once = max(1, _l2_bytes(a.device) // 2 // bytes_each)
    return max(1, min(lanes, at_once * sharing))


def _l2_bytes(device: torch.device) -> int:
    return _device_l2_bytes(runtime.device_key(device)) if device.type == "cuda" else 1 << 25


@functools.cache
def _device_l2_bytes(index: int) -> int:
    return int(getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 1 << 25))
