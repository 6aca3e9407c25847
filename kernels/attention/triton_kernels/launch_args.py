"""How an attention kernel is launched: block shapes, constants, strides, how many programs in which
order.

Knows shapes and the tuned tables; launches nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.attention.spec import Bounds, Form, head_dim
from kernels.attention.triton_kernels.configs import parts
from kernels.jit import UPCAST, cdiv

LOG2_E = 1.4426950408889634


def config_of(op: str, q: Tensor, v: Tensor, form: Form) -> dict[str, Any]:
    return tuning.config(
        op,
        d=q.shape[-1],
        dv=v.shape[-1],
        head_dim=head_dim(q, v),  # as words: tables round numbers up to powers of two
        wide=q.dtype is torch.float32,
        causal=form.causal,
        window=form.window > 0,
        softcap=form.softcap > 0,
    )


def constants_of(
    q: Tensor, v: Tensor, form: Form, bounds: Bounds | None, chosen: dict[str, Any]
) -> dict[str, Any]:
    (d_a, d_b), (v_a, v_b) = parts(q.shape[-1]), parts(v.shape[-1])
    return {
        "RAGGED": bounds is not None,
        "CAUSAL": form.causal,
        "WINDOWED": form.window > 0,
        "SOFTCAP": form.softcap > 0,
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


def numbers_of(form: Form) -> tuple[int, float, float, float, float]:
    """window, scale, and in base 2: scale (1 of what is capped already), the cap's way in and out."""
    cap = form.softcap
    if cap:
        return form.window, form.scale, 1.0, 2 * LOG2_E * form.scale / cap, cap * LOG2_E
    return form.window, form.scale, form.scale * LOG2_E, 0.0, 0.0


def strides_of(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def addressable_of(x: Tensor) -> Tensor:
    """The tensor, or a copy where its columns are apart or a tile of its rows is beyond 32-bit
    offsets.
    """
    apart = x.stride(-1) != 1 and x.shape[-1] > 1
    return x.contiguous() if apart or abs(x.stride(1)) >= 1 << 23 else x


def tiles_of(x: Tensor, cu: Tensor | None, block: int) -> int:
    """Tiles of one lane; for a ragged batch the slots that hold them (`jit.ragged_tile`)."""
    return cdiv(x.shape[1], block) if cu is None else x.shape[1] // block + len(cu) - 1


def splits_of(programs: int, group: int, device: torch.device) -> int:
    """Into how many sums, a divisor of the group, the query heads of a key-value head go: enough
    programs for two a
    multiprocessor, where one key-value head serves many (MQA) and the batch is small."""
    wanted = 2 * runtime.sm_count(device)
    return next((n for n in range(1, group) if group % n == 0 and programs * n >= wanted), group)


def section_of(a: Tensor, b: Tensor, lanes: int, heads: int, bounds: Bounds | None) -> int:
    """Lanes whose streamed tensors fit half of the L2 cache together, a multiple of those that
    share a head.
    """
    length = max(bounds.max_q, bounds.max_k) if bounds else a.shape[1]
    bytes_each = max(1, length * (a.shape[-1] + b.shape[-1]) * a.element_size())
    sharing = max(1, heads // a.shape[2])
    at_once = max(1, _l2_bytes(a.device) // 2 // bytes_each)
    return max(1, min(lanes, at_once * sharing))


def _l2_bytes(device: torch.device) -> int:
    return _l2_bytes_of(runtime.device_key(device)) if device.type == "cuda" else 1 << 25


@functools.cache
def _l2_bytes_of(index: int) -> int:
    return int(getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 1 << 25))
