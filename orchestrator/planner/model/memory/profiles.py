"""Default memory parameters of frameworks that differ from the general defaults.

Plausible published values; a calibration replaces them. Does not depend on the device.
"""

from __future__ import annotations

MEMORY_PROFILES: dict[str, dict[str, float]] = {
    # peaks in logs of Megatron-DeepSpeed runs are those the allocator reserves (BLOOM's chronicles)
    "megatron-deepspeed": {
        "working_tensors": 16.0,
        "unattributed_fraction": 0.03,
        "allocator_overhead": 0.01,
    },
    # torchtitan reports reserved bytes (torchtitan/components/metrics.py, max_reserved): on H100 7
    # to 34% more than the predicted allocations of 8 published runs, 16% in the median
    "fsdp2": {"allocator_overhead": 0.15},
}
