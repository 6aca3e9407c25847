"""Describes which kernels a run's first step selected, and why.

Pure functions of the event's data. Does not depend on how events are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

EVENT: Final = "kernels_chosen"
_OPERATIONS: Final = {
    "adamw": "AdamW",
    "apply_rope": gettext_noop("rotary position embedding"),
    "attention_varlen": gettext_noop("variable-length attention"),
    "cross_entropy": gettext_noop("LM head and loss"),
    "int4_matmul": gettext_noop("int4 matmul"),
    "int8_matmul": gettext_noop("int8 matmul"),
    "fp8_matmul": gettext_noop("fp8 matmul"),
    "layer_norm": "LayerNorm",
    "linear_cross_entropy": gettext_noop("LM head matmul and loss"),
    "mla_decode": gettext_noop("latent attention, decode"),
    "paged_attention": gettext_noop("paged attention"),
    "rms_norm": "RMSNorm",
    "swiglu": "SwiGLU",
    "write_kv": gettext_noop("KV cache write"),
}
_BACKENDS: Final = {
    "own": gettext_noop("Orrery kernel"),
    "cudnn": "cuDNN",
    "flash": gettext_noop("torch, FlashAttention"),
    "efficient": gettext_noop("torch, memory-efficient"),
    "math": gettext_noop("torch, math"),
    "torch": "torch",
    "reference": gettext_noop("reference implementation"),
}
_RUNTIME: Final = {
    "gpu": gettext_noop("Orrery kernels can run on this GPU"),
    "interpret": gettext_noop("Orrery kernels run in Triton's interpreter"),
    "reference": gettext_noop("Orrery kernels cannot run here"),
}


def table(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{summary, rows: [{op, call, backend, own, reason}], versions, more}`.

    One row per kind of call, in order of first use.
    """
    rows = [
        {
            "op": operation_title(str(row.get("op"))),
            "call": str(row.get("call") or ""),
            "backend": _(_BACKENDS.get(str(row.get("backend")), str(row.get("backend")))),
            "own": row.get("backend") == "own",
            "reason": str(row.get("reason") or ""),
        }
        for row in _operations(data)
    ]
    versions = [f"{name} {data[name]}" for name in ("torch", "triton") if data.get(name)]
    more = int(data.get("left_out") or 0)
    return {
        "summary": f"{summarize(data)}.",
        "rows": rows,
        "versions": ", ".join(versions),
        "more": more,
    }


def summarize(data: Mapping[str, Any]) -> str:
    """Return "Orrery kernels run 4 of 6 operations on sm_90", without a full stop."""
    if data.get("fused") is False:
        return _("Fused kernels are off: all operations run in plain PyTorch")
    ops = {str(row.get("op")) for row in _operations(data)}
    own = {str(row.get("op")) for row in _operations(data) if row.get("backend") == "own"}
    if not own:
        text = ngettext(
            "PyTorch kernels run %(count)s operation",
            "PyTorch kernels run all %(count)s operations",
            len(ops),
        ) % {"count": len(ops)}
        runtime = _RUNTIME.get(str(data.get("runtime")), "")
        return text + (f": {_(runtime)}" if runtime else "")
    text = ngettext(
        "Orrery kernels run %(own)s of %(count)s operation",
        "Orrery kernels run %(own)s of %(count)s operations",
        len(ops),
    ) % {"own": len(own), "count": len(ops)}
    if data.get("runtime") == "gpu" and data.get("arch"):
        text += _(" on %(arch)s") % {"arch": data["arch"]}
    return text


def operation_title(name: str) -> str:
    """Return the readable name of an operation."""
    return _(_OPERATIONS.get(name, name.replace("_", " ")))


def _operations(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    rows = data.get("operations")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
