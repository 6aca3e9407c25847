"""Compares measured rates with a node's own record. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from workers.contracts.wire.maintenance.preflight import ProbeReference, ProbeValue, Shortfall

_UNITS = {
    "matmul": ("matmul rate", 1e9, "GFLOP/s"),
    "memory": ("memory bandwidth", 1e9, "GB/s"),
    "all_reduce_node": ("all-reduce bandwidth in the node", 1e9, "GB/s"),
    "all_reduce": ("all-reduce bandwidth of the gang", 1e9, "GB/s"),
}


def shortfalls(
    values: Iterable[ProbeValue], references: Iterable[ProbeReference], *, least_share: float
) -> list[Shortfall]:
    """The rates below `least_share` of their reference; those without one are not judged."""
    known = {(item.measure, item.device, item.ranks): item for item in references}
    result = []
    for value in values:
        reference = known.get((value.measure, value.device, value.ranks))
        if reference is None or value.value >= least_share * reference.value:
            continue
        name, scale, unit = _UNITS[value.measure]
        where = "" if value.device is None else f" of device {value.device}"
        message = (
            f"{name[0].upper()}{name[1:]}{where} is {value.value / scale:.3g} {unit}, "
            f"{value.value / reference.value:.0%} of the node's record of "
            f"{reference.value / scale:.3g} {unit} (median of {reference.samples})"
        )
        result.append(
            Shortfall(
                measure=value.measure,
                device=value.device,
                value=value.value,
                reference=reference.value,
                message=message,
            )
        )
    return result
