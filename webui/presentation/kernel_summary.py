"""Which kernels a run's first step chose, and why, in words.

Pure: knows the event's data, not where it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from webui.presentation import formatting

EVENT: Final = "kernels_chosen"
_OPERATIONS: Final = {
    "adamw": "AdamW",
    "apply_rope": "rotary positions",
    "attention_varlen": "attention within documents",
    "cross_entropy": "head and loss",
    "int4_matmul": "int4 product",
    "int8_matmul": "int8 product",
    "fp8_matmul": "fp8 product",
    "layer_norm": "LayerNorm",
    "linear_cross_entropy": "head's product and loss",
    "mla_decode": "latent attention, decode",
    "paged_attention": "paged attention",
    "rms_norm": "RMSNorm",
    "swiglu": "SwiGLU",
    "write_kv": "keys and values to the cache",
}
_RAN: Final = {
    "own": "own kernel",
    "cudnn": "cuDNN",
    "flash": "torch, FlashAttention",
    "efficient": "torch, memory-efficient",
    "math": "torch, block by block",
    "torch": "torch",
    "reference": "reference formula",
}
_RUNTIME: Final = {
    "gpu": "own kernels can run on this GPU",
    "interpret": "own kernels run in Triton's interpreter",
    "reference": "own kernels cannot run here",
}


def table(data: Mapping[str, Any]) -> dict[str, Any]:
    """`{says, rows: [{op, call, ran, own, reason}], versions, more}`; a row a kind of call, in
    order of first use.
    """
    rows = [
        {
            "op": operation(str(row.get("op"))),
            "call": str(row.get("call") or ""),
            "ran": _RAN.get(str(row.get("backend")), str(row.get("backend"))),
            "own": row.get("backend") == "own",
            "reason": str(row.get("reason") or ""),
        }
        for row in _operations(data)
    ]
    versions = [f"{name} {data[name]}" for name in ("torch", "triton") if data.get(name)]
    more = int(data.get("left_out") or 0)
    return {
        "says": f"{sentence(data)}.",
        "rows": rows,
        "versions": ", ".join(versions),
        "more": more,
    }


def sentence(data: Mapping[str, Any]) -> str:
    """ "4 of 6 operations run by own kernels on sm_90", without a full stop."""
    if data.get("fused") is False:
        return "Formulas run step by step in plain torch, as the run asks; no kernel was chosen"
    ops = {str(row.get("op")) for row in _operations(data)}
    own = {str(row.get("op")) for row in _operations(data) if row.get("backend") == "own"}
    where = f" on {data['arch']}" if data.get("runtime") == "gpu" and data.get("arch") else ""
    runtime = _RUNTIME.get(str(data.get("runtime")), "")
    if not own:
        return f"torch's kernels run {formatting.count(len(ops), 'operation')}" + (
            f": {runtime}" if runtime else ""
        )
    return f"Own kernels run {len(own)} of {formatting.count(len(ops), 'operation')}{where}"


def operation(name: str) -> str:
    return _OPERATIONS.get(name, name.replace("_", " "))


def _operations(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found = data.get("operations")
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
