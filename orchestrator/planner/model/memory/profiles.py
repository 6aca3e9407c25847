"""Defaults of the memory coefficients by framework, where they differ from the usual.

Plausible numbers of the field; a calibration replaces them. Knows no device.
"""

from __future__ import annotations

MEMORY_PROFILES: dict[str, dict[str, float]] = {
    # peaks in logs of Megatron-DeepSpeed runs are those the allocator reserves (BLOOM's chronicles)
    "megatron-deepspeed": {"working_tensors": 16.0, "unattributed_fraction": 0.03},
}
