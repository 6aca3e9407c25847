"""Names and order of the stored metrics, the steps of stored points, and the idle limit."""

from __future__ import annotations

from typing import Final

MINUTE_S: Final = 60
QUARTER_S: Final = 900
DAY_S: Final = 86_400
# seconds that one stored row covers, by step
ROW_S: Final = {MINUTE_S: QUARTER_S, QUARTER_S: DAY_S}

# of each device
DEVICE: Final = ("utilization", "memory_used_bytes", "power_w", "temperature_c")
# of the node
NODE: Final = (
    "cpu_utilization",
    "memory_used_bytes",
    "power_w",
    "temperature_c",
    "received_bytes_per_s",
    "sent_bytes_per_s",
    "rdma_received_bytes_per_s",
    "rdma_sent_bytes_per_s",
)
# of a pool; numbers of devices, and the sums of their utilization and power
POOL: Final = ("devices", "allocated", "busy", "idle", "utilization", "power_w", "measured")

MIN, MEAN, MAX = 0, 1, 2

IDLE_BELOW: Final = 0.05  # utilization that no reading of an idle minute reaches
IDLE_AFTER_S: Final = 600.0  # pages list devices that have been idle for this long
