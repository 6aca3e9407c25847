"""The attention kernels that the gate compiles: each kernel at each head dim, and the most
demanding variants.
"""

from __future__ import annotations

from typing import Any

from kernels import tuning
from kernels.attention.triton_kernels import configs
from kernels.attention.triton_kernels.backward_keys_values import (
    attention_keys_values_backward_kernel,
)
from kernels.attention.triton_kernels.backward_queries import attention_queries_backward_kernel
from kernels.attention.triton_kernels.backward_row_sums import attention_row_sums_kernel
from kernels.attention.triton_kernels.configs import split_head_dim
from kernels.attention.triton_kernels.forward import attention_forward_kernel
from kernels.attention.triton_kernels.forward_tma import attention_forward_tma_kernel
from kernels.shipped import ShippedKernel

_STRIDES = ("q_", "k_", "v_", "o_", "do_", "dq_", "dk_", "dv_")


def shipped(arch: str) -> list[ShippedKernel]:
    """bf16, causal unless the name says otherwise."""
    hopper = arch == "sm_90"
    product = ("wgmma",) if hopper else ("mma.sync",)
    masked_scores = {"CAUSAL": True, "WINDOWED": True, "SOFTCAP": True, "RAGGED": True}
    rules = {
        "forward": (
            attention_forward_kernel,
            configs.forward,
            [(64, 64), (128, 128), (192, 128), (256, 256)],
        ),
        "keys_values": (
            attention_keys_values_backward_kernel,
            configs.keys_values,
            [(64, 64), (128, 128), (192, 128), (256, 256)],
        ),
        "queries": (
            attention_queries_backward_kernel,
            configs.queries,
            [(128, 128), (192, 128), (256, 256)],
        ),
    }
    kernels = []
    for kernel, (fn, rule, dims) in rules.items():
        for d, dv in dims:
            chosen = rule(arch, _facts(d, dv))
            kernels.append(
                _configuration(
                    f"{kernel} {d}/{dv}", fn, chosen, _constants(d, dv, chosen), product, arch
                )
            )
    for kernel, (fn, rule, _) in rules.items():
        chosen = rule(arch, {**_facts(128, 128), "window": True, "softcap": True})
        constants = _constants(128, 128, chosen) | masked_scores
        kernels.append(
            _configuration(
                f"{kernel} 128 packed, window, softcap", fn, chosen, constants, product, arch
            )
        )
    if hopper:
        for d, dv in ((64, 64), (128, 128), (192, 128)):
            chosen = configs.forward_tma(arch, _facts(d, dv))
            kernels.append(_tma(f"forward sm_90 variant {d}/{dv}", d, dv, chosen))
        chosen = configs.row_sums(arch, {})
        sums = {"DV": 128, "DP": 128, "HAS_DLSE": True, "BM": chosen["block_m"]}
        kernels.append(
            _configuration("row sums 128", attention_row_sums_kernel, chosen, sums, (), arch)
        )
    return kernels


def _facts(d: int, dv: int) -> dict[str, Any]:
    return {"d": d, "dv": dv, "wide": False, "causal": True, "window": False, "softcap": False}


def _constants(d: int, dv: int, chosen: tuning.Config) -> dict[str, Any]:
    (d_a, d_b), (v_a, v_b) = split_head_dim(d), split_head_dim(dv)
    return {
        "RAGGED": False,
        "CAUSAL": True,
        "WINDOWED": False,
        "SOFTCAP": False,
        "D": d,
        "DV": dv,
        "DA": d_a,
        "DB": d_b,
        "VA": v_a,
        "VB": v_b,
        "BM": chosen["block_m"],
        "BN": chosen["block_n"],
        "UPCAST": False,
        **({"ONE_LOOP": chosen["one_loop"]} if "one_loop" in chosen else {}),
    }


def _configuration(
    name: str,
    fn: Any,
    chosen: tuning.Config,
    constants: dict[str, Any],
    expects: tuple[str, ...],
    arch: str,
) -> ShippedKernel:
    constants = dict(constants)
    signature = {}
    for argument in getattr(fn, "arg_names", ()):
        if argument in constants:
            continue
        if argument in ("CU_Q", "CU_K"):
            if constants["RAGGED"]:
                signature[argument] = "*i32"
            else:
                constants[argument] = None
        else:
            signature[argument] = _type(argument)
    reason = configs.SPILLS_OK.get((arch, name))
    return ShippedKernel(
        "attention",
        name,
        fn,
        signature,
        constants,
        chosen["num_warps"],
        chosen["num_stages"],
        expects,
        reason,
    )


def _tma(name: str, d: int, dv: int, chosen: tuning.Config) -> ShippedKernel:
    m, n, (d_a, d_b) = chosen["block_m"], chosen["block_n"], split_head_dim(d)
    tables = {
        "Q_A": (m, d_a),
        "Q_B": (m, d_b or d_a),
        "K_A": (n, d_a),
        "K_B": (n, d_b or d_a),
        "V": (n, dv),
    }
    constants = {
        "CAUSAL": True,
        "DA": d_a,
        "DB": d_b,
        "DV": dv,
        "BM": m,
        "BN": n,
        "UPCAST": False,
        "WARP_SPECIALIZE": chosen["warp_specialize"],
    }
    signature = {
        argument: f"tensordesc<bf16[{','.join(map(str, tables[argument]))}]>"
        if argument in tables
        else _type(argument)
        for argument in getattr(attention_forward_tma_kernel, "arg_names", ())
        if argument not in constants
    }
    expects = ("wgmma", "setmaxnreg")
    return ShippedKernel(
        "attention",
        name,
        attention_forward_tma_kernel,
        signature,
        constants,
        chosen["num_warps"],
        chosen["num_stages"],
        expects,
    )


def _type(argument: str) -> str:
    if argument in ("LSE", "DELTA", "DLSE"):
        return "*fp32"
    if argument.isupper():
        return "*bf16"
    if argument.startswith(("scale", "cap_")):
        return "fp32"
    stride = argument.startswith(_STRIDES) and argument[-2:] in ("_b", "_s", "_h")
    return "i32:16" if stride else "i32"
