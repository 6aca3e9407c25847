"""Numbers that stand for named choices in columns of plans, and the bytes of dtypes."""

from __future__ import annotations

RECOMPUTE = {"none": 0, "selective": 1, "full": 2, "auto": 3}


SCHEDULE = {
    name: code
    for code, name in enumerate(
        ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "pipedream")
    )
}


PRECISION = {"fp32": 0, "bf16": 1, "fp16": 2, "fp8": 3}


OFFLOAD = {"none": 0, "optimizer": 1, "all": 2, "nvme": 3}


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
