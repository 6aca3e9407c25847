"""`int4_matmul`: few rows read the four-bit weight as it lies; many rows decode it once and go to
cuBLAS.

Checks, choice, launch. Knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, choose
from kernels.int4.kernel import int4_dequantize_kernel, int4_matmul_kernel
from kernels.int4.pack import CHUNK, ROWS, check_group, decoded
from kernels.jit import UPCAST, cdiv, tl
from kernels.shipped import Shipped
from kernels.split_k import choose_splits, sum_splits

MOST_OWN_ROWS = 128
"""From here on decoding once and multiplying by cuBLAS comes first."""

OFFSETS = {torch.bfloat16: 128.0, torch.float16: 1024.0, torch.float32: 0.0}


def int4_matmul(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: int = 128,
    *,
    num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """x·wᵀ `[…, N]` in x's dtype, for w `[N, K]` as `pack_awq(w, group)` packed it.

    x `[…, K]`; qweight `[ceil(K / 128) · 16, N]` int32, scales `[ceil(K / group), N]` float, zeros
    alike uint8.
    num_splits: parts of K on a GPU, else chosen. Raises ValueError or TypeError.
    """
    _checked(x, qweight, scales, zeros, group, num_splits)
    x_MK, n = x.reshape(-1, x.shape[-1]), qweight.shape[1]
    m, k = x_MK.shape
    facts: dict[str, object] = {
        "rows": tuning.round_up(m),
        "n": n,
        "k": k,
        "group": group,
        "dtype": x.dtype,
        "device": x.device.type,
    }
    own = Candidate("own", runtime.cannot(x) or (None if m and n else "an empty operand"))
    torchs = Candidate("torch")
    order = (own, torchs) if m < MOST_OWN_ROWS else (torchs, own)
    chosen = choose("int4_matmul", facts, (*order, Candidate("reference")), backend).backend
    if chosen == "own":
        out = _launched(x_MK, qweight, scales, zeros, group, num_splits)
    elif chosen == "torch":
        # 500x slower on a CPU
        kind = torch.float32 if x.dtype == torch.float16 and not x.is_cuda else x.dtype
        out = (x_MK.to(kind) @ weight(qweight, scales, zeros, group, k, kind)).to(x.dtype)
    else:
        out = (x_MK.float() @ decoded(qweight, scales, zeros, group, k, torch.float32)).to(x.dtype)
    return out.view(*x.shape[:-1], n)


def weight(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, k: int, kind: torch.dtype
) -> Tensor:
    """The decoded weight `[K, N]`, rounded to `kind` once."""
    if runtime.mode(qweight) != "gpu" or not qweight.numel():
        return decoded(qweight, scales, zeros, group, k, torch.float32).to(kind)
    out = torch.empty(k, qweight.shape[1], dtype=kind, device=qweight.device)
    with runtime.on(qweight):
        _decode(qweight, scales, zeros, group, out)
    return out


def _decode(qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, out: Tensor) -> None:
    k, n = out.shape
    int4_dequantize_kernel[(cdiv(k, CHUNK) * cdiv(n, 64),)](
        qweight,
        scales,
        zeros,
        out,
        n,
        k,
        qweight.stride(0),
        scales.stride(0),
        zeros.stride(0),
        out.stride(0),
        GROUP=group,
        BLOCK_N=64,
    )


def _checked(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, num_splits: int | None
) -> None:
    checks.dtype_among("x", x)
    check_group(group)
    checks.dtype_among("qweight", qweight, (torch.int32,))
    checks.dtype_among("scales", scales)
    checks.dtype_among("zeros", zeros, (torch.uint8,))
    if x.dim() < 1:
        raise ValueError("x has no dimensions; it must be [..., K].")
    k = x.shape[-1]
    checks.shape("qweight", qweight, (cdiv(k, CHUNK) * ROWS, None), "ceil(K / 128) · 16, outputs")
    checks.shape("scales", scales, (cdiv(k, group), qweight.shape[1]), "ceil(K / group), outputs")
    checks.shape("zeros", zeros, (cdiv(k, group), qweight.shape[1]), "ceil(K / group), outputs")
    checks.same_device(x=x, qweight=qweight, scales=scales, zeros=zeros)
    for name, y in (("x", x), ("qweight", qweight), ("scales", scales), ("zeros", zeros)):
        checks.contiguous_last(name, y)
    checks.splits(num_splits)


@tuning.rule("int4_matmul")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    rows = int(facts["rows"])
    # exact products run without tensor cores, their operands in registers
    if facts["dtype"] == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {
        "BLOCK_M": min(64, max(16, rows)),
        "BLOCK_N": 64 if rows <= 32 else 128,
        "num_warps": 4,
        "num_stages": 4,
    }


def _launched(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, num_splits: int | None
) -> Tensor:
    (m, k), n = x.shape, qweight.shape[1]
    config = tuning.config("int4_matmul", dtype=x.dtype, rows=tuning.round_up(m), n=n, k=k)
    programs = cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    splits = num_splits or choose_splits(
        programs, cdiv(k, CHUNK), runtime.sm_count(x.device), programs_per_sm=4
    )
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    parts = out.unsqueeze(0)
    if splits > 1:
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    kind = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        x.dtype
    ]
    with runtime.on(x):
        int4_matmul_kernel[(programs * splits,)](
            x,
            qweight,
            scales,
            zeros,
            parts,
            m,
            n,
            k,
            splits,
            x.stride(0),
            qweight.stride(0),
            scales.stride(0),
            zeros.stride(0),
            *parts.stride()[:2],
            GROUP=group,
            KIND=kind,
            OFFSET=OFFSETS[x.dtype],
            UPCAST=UPCAST,
            **config,
        )
        if splits > 1:
            sum_splits(parts, out)
    return out


def shipped(arch: str) -> list[Shipped]:
    """One row and 64 of bf16, groups of 128; one row of fp16, groups of 32; the decoding."""
    found = []
    for rows, name, kind, group in (
        (1, "bf16", tl.bfloat16, 128),
        (64, "bf16", tl.bfloat16, 128),
        (1, "fp16", tl.float16, 32),
    ):
        config = _rule(arch, {"dtype": None, "rows": rows})
        signature = {
            "X": f"*{name}",
            "Q": "*i32",
            "SCALES": f"*{name}",
            "ZEROS": "*u8",
            "OUT": "*fp32",
        }
        signature |= {"m": "i32", "splits": "i32"} | dict.fromkeys(
            ("n", "k", "x_m", "q_k", "s_g", "z_g", "o_p", "o_m"), "i32:16"
        )
        constants: dict[str, Any] = {key: config[key] for key in ("BLOCK_M", "BLOCK_N")}
        constants |= {
            "GROUP": group,
            "KIND": kind,
            "OFFSET": 128.0 if name == "bf16" else 1024.0,
            "UPCAST": False,
        }
        warps, stages = config["num_warps"], config["num_stages"]
        label = f"rows-{rows}-{name}-{group}"
        expects = ("mma",)
        found.append(
            Shipped(
                "int4_matmul",
                label,
                int4_matmul_kernel,
                signature,
                constants,
                warps,
                stages,
                expects,
            )
        )
    signature = {"Q": "*i32", "SCALES": "*bf16", "ZEROS": "*u8", "OUT": "*bf16"}
    signature |= dict.fromkeys(("n", "k", "q_k", "s_g", "z_g", "o_k"), "i32:16")
    found.append(
        Shipped(
            "int4_matmul",
            "decode",
            int4_dequantize_kernel,
            signature,
            {"GROUP": 128, "BLOCK_N": 64},
        )
    )
    return found
