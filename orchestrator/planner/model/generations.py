"""The kernel family of each device. Does not depend on parameters."""

from __future__ import annotations

from workers.contracts.catalog.devices import Device

_FAMILIES = {
    "v100": "volta",
    "a100": "ampere",
    "a800": "ampere",
    "h100": "hopper",
    "h800": "hopper",
    "h20": "hopper",
    "h200": "hopper",
    "b200": "blackwell",
    "gb200": "blackwell",
}


def generation(device: Device) -> str:
    """The kernel family of a device: volta, ampere, hopper, blackwell, other or cpu."""
    return "cpu" if device.kind == "cpu" else _FAMILIES.get(device.name.split("-")[0], "other")
