"""A node's rates from the files of its ranks. Does not depend on torch or on processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.contracts.wire.maintenance.preflight import ProbeValue, Shortfall

_OWN_STAGES = ("start", "matmul", "memory")  # without any other rank


def values_of(
    results: Sequence[Mapping[str, Any]], devices: Sequence[int], *, world: int, gpu: bool
) -> list[ProbeValue]:
    """The node's rates: per device, and once per collective.

    `results` are of the local ranks in order. CPU slots share cores, so their number counts.
    """
    together = 1 if gpu else len(devices)
    values = []
    for measure in ("matmul", "memory"):
        for result, device in zip(results, devices, strict=True):
            if rate := result.get(measure):
                values.append(
                    ProbeValue(measure=measure, device=device, ranks=together, value=rate)
                )
    for measure, ranks in (("all_reduce_node", len(devices)), ("all_reduce", world)):
        rates = [result[measure] for result in results if result.get(measure)]
        if rates:
            values.append(ProbeValue(measure=measure, ranks=ranks, value=min(rates)))
    return values


def failures_of(
    results: Sequence[Mapping[str, Any]], devices: Sequence[int], exits: Sequence[int | None]
) -> list[Shortfall]:
    """Ranks that did not finish; `exits` are their codes, None after a timeout.

    If a device failed alone, the other ranks only lost it and are left out.
    """
    failures = []
    for result, device, code in zip(results, devices, exits, strict=True):
        if code == 0 and result.get("stage") == "done":
            continue
        stage = str(result.get("stage") or "start")
        error = result.get("error") or (
            "did not finish in time" if code is None else f"exited with code {code}"
        )
        alone = stage in _OWN_STAGES
        failures.append(
            Shortfall(
                measure=stage,
                device=device if alone else None,
                message=f"Probe of device {device} failed at {stage}: {error}",
            )
        )
    own = [failure for failure in failures if failure.device is not None]
    return own or failures[:1]
