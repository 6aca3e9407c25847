"""`int4_matmul`: few rows read the packed four-bit weight; many rows dequantize it once and use
cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, choose
from kernels.int4.kernel import int4_dequantize_kernel, int4_matmul_kernel
from kernels.int4.pack import CHUNK, ROWS, check_group, dequantize
from kernels.jit import UPCAST, cdiv, tl
from kernels.shipped import ShippedKernel
from kernels.split_k import choose_splits, sum_splits

MAX_OWN_ROWS = 128
"""From here on dequantizing once and multiplying by cuBLAS comes first."""

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
    """x·wᵀ `[…, N]` in x's dtype, for w `[N, K]` packed by `pack_awq(w, group)`.

    x `[…, K]`; qweight `[ceil(K / 128) · 16, N]` int32, scales `[ceil(K / group), N]` float, zeros
    of the same shape uint8. num_splits: splits of K on a GPU, chosen if None. Raises ValueError or
    TypeError.
    """
    _check(x, qweight, scales, zeros, group, num_splits)
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
    own_candidate = Candidate(
        "own", runtime.why_not(x) or (None if m and n else "an empty operand")
    )
    torch_candidate = Candidate("torch")
    order = (
        (own_candidate, torch_candidate) if m < MAX_OWN_ROWS else (torch_candidate, own_candidate)
    )
    chosen = choose("int4_matmul", facts, (*order, Candidate("reference")), backend).backend
    if chosen == "own":
        out = _launch(x_MK, qweight, scales, zeros, group, num_splits)
    elif chosen == "torch":
        # 500x slower on a CPU
        kind = torch.float32 if x.dtype == torch.float16 and not x.is_cuda else x.dtype
        out = (x_MK.to(kind) @ dequantize_weight(qweight, scales, zeros, group, k, kind)).to(
            x.dtype
        )
    else:
        out = (x_MK.float() @ dequantize(qweight, scales, zeros, group, k, torch.float32)).to(
            x.dtype
        )
    return out.view(*x.shape[:-1], n)


def dequantize_weight(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, k: int, kind: torch.dtype
) -> Tensor:
    """The dequantized weight `[K, N]`, rounded to `kind` once."""
    if runtime.mode(qweight) != "gpu" or not qweight.numel():
        return dequantize(qweight, scales, zeros, group, k, torch.float32).to(kind)
    out = torch.empty(k, qweight.shape[1], dtype=kind, device=qweight.device)
    with runtime.device_guard(qweight):
        _launch_dequantize(qweight, scales, zeros, group, out)
    return out


def _launch_dequantize(
    qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, out: Tensor
) -> None:
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


def _check(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, group: int, num_splits: int | None
) -> None:
    checks.dtype_in("x", x)
    check_group(group)
    checks.dtype_in("qweight", qweight, (torch.int32,))
    checks.dtype_in("scales", scales)
    checks.dtype_in("zeros", zeros, (torch.uint8,))
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
    # exact products do not use tensor cores; their operands are in registers
    if facts["dtype"] == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {
        "BLOCK_M": min(64, max(16, rows)),
        "BLOCK_N": 64 if rows <= 32 else 128,
        "num_warps": 4,
        "num_stages": 4,
    }


@tuning.candidates("int4_matmul")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    exact = facts["dtype"] == torch.float32
    choices = tuning.combinations(
        BLOCK_N=(16, 32) if exact else (64, 128, 32),
        num_warps=(4, 8),
        num_stages=(2, 3) if exact else (4, 3, 5),
    )
    return tuning.changes(_rule(arch, facts), *choices)


def _launch(
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
    with runtime.device_guard(x):
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


def shipped(arch: str) -> list[ShippedKernel]:
    """One row and 64 of bf16, groups of 128; one row of fp16, groups of 32; dequantization."""
    kernels = []
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
        kernels.append(
            ShippedKernel(
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
    kernels.append(
        ShippedKernel(
            "int4_matmul",
            "decode",
            int4_dequantize_kernel,
            signature,
            {"GROUP": 128, "BLOCK_N": 64},
        )
    )
    return kernels
