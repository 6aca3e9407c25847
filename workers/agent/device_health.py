"""Health of GPUs by NVML: lost devices, XID errors, memory errors, throttling.

Judges single devices. Does not decide what happens to runs. A query that a driver does not support
counts as no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# the application's own faults (13, 31, 43, 45, …) do not count against the device
FATAL_XIDS = {
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "high rate of single-bit memory errors",
    95: "uncontained memory error",
    119: "GSP timeout",
    120: "GSP error",
}
_THROTTLES = {  # bits of nvml.h, nvmlClocksEventReasons
    0x40: "thermal (hardware)",
    0x20: "thermal (software)",
    0x80: "power brake",
}


class DeviceHealth:
    """Findings on the GPUs behind `handles`; a fatal XID counts until the agent restarts."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._xids: dict[int, int] = {}
        self._events = self._register()

    def problem(self, index: int) -> str | None:
        """Why the device cannot be used; None if it can."""
        nvml, handle = self._nvml, self._handles[index]
        try:
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except (nvml.NVMLError, TypeError, ValueError) as error:
            return f"The device does not answer: {str(error) or type(error).__name__}."
        xid = self._xids.get(index)
        if xid is not None:
            return f"XID {xid}: {FATAL_XIDS[xid]}. Reset the GPU, then restart the agent."
        errors = self._query(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))
        if errors:
            return f"{errors} uncorrected memory errors (ECC) since the driver started."
        remapped = self._query(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        if remapped is not None and remapped[3]:
            return "A defective memory row cannot be remapped; replace the GPU."
        if remapped is not None and remapped[2]:
            return "A memory row waits to be remapped; reset the GPU."
        return None

    def throttled(self, index: int) -> str | None:
        """Why the clocks are reduced beyond the power cap; None if they are not."""
        nvml, handle = self._nvml, self._handles[index]
        reasons = self._query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        names = [name for bit, name in _THROTTLES.items() if reasons and int(reasons) & bit]
        return ", ".join(names) or None

    def poll(self) -> None:
        """Read the XID errors since the last call; returns at once."""
        for _ in range(100):
            event = self._query(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                return
            xid = int(event.eventData)
            for index, handle in enumerate(self._handles):
                if xid in FATAL_XIDS and self._same(handle, event.device):
                    self._xids[index] = xid

    def _register(self) -> Any:
        nvml = self._nvml
        if not self._handles:
            return None
        events = self._query(lambda: nvml.nvmlEventSetCreate())
        for handle in self._handles if events is not None else ():
            self._query(partial(self._watch, handle, events))
        return events

    def _watch(self, handle: Any, events: Any) -> None:
        self._nvml.nvmlDeviceRegisterEvents(
            handle, self._nvml.nvmlEventTypeXidCriticalError, events
        )

    def _same(self, handle: Any, other: Any) -> bool:
        if handle == other:
            return True
        uuid = self._query(lambda: self._nvml.nvmlDeviceGetUUID(other))
        return uuid is not None and uuid == self._query(
            lambda: self._nvml.nvmlDeviceGetUUID(handle)
        )

    def _query(self, read: Callable[[], Any]) -> Any:
        """The answer; None if the driver or the binding does not support the query."""
        try:
            return read()
        except (self._nvml.NVMLError, AttributeError, TypeError):
            return None
