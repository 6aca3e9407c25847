"""Physical parameters that measurements can calibrate, each with bounds and a default.

Provides values as columns. Does not fit anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.kriging import LENGTHS, columns
from orchestrator.planner.model.profiles import profile, published
from orchestrator.planner.model.terms import Column, Table, declare_inputs
from workers.contracts.catalog.devices import Device


@dataclass(frozen=True, slots=True)
class Parameter:
    """A calibratable number with its default and bounds.

    `sigma` is the prior's spread in log space: how far from its default a device may plausibly be.
    """

    name: str
    default: float
    low: float
    high: float
    sigma: float
    unit: str
    description: str


PARAMETERS: dict[str, Parameter] = {}

# order of the norm that keeps predictions below the best published MFU: at that MFU they take 6%
# longer without any run of the pair, and 1.5% longer with the runs that set its profile
UNMEASURED_NORM, PUBLISHED_NORM = 12.0, 48.0


def declare(*parameters: Parameter) -> None:
    """Registers parameters for the fit and the explain tree.

    Raises ValueError for a duplicate name or invalid bounds.
    """
    for each in parameters:
        if each.name in PARAMETERS:
            raise ValueError(f"parameter {each.name} is declared twice")
        if not 0 < each.low <= each.default <= each.high:
            raise ValueError(
                f"parameter {each.name}: bounds {each.low}..{each.high} do not contain "
                f"{each.default}"
            )
        PARAMETERS[each.name] = each
        declare_inputs(each.unit, f"calibration or default profile: {each.description}", each.name)


declare(
    Parameter(
        "gemm_efficiency",
        0.70,
        0.2,
        1.0,
        0.15,
        "",
        "share of peak that large matrix products reach",
    ),
    Parameter("fp8_efficiency", 0.7, 0.2, 1.0, 0.2, "", "fp8 efficiency relative to bf16"),
    # roofline of an A100: 153 FLOPs per byte for the weights. The split sides of a layer's shards,
    # 3, 1, 4 and 4 widths long, give 51 for the width; it is set to 60, and fits give 63
    Parameter(
        "gemm_half_tokens",
        150,
        20,
        4000,
        0.6,
        "tokens",
        "tokens at which a product has half its speed",
    ),
    Parameter(
        "gemm_half_width",
        60,
        20,
        8000,
        0.6,
        "",
        "sharded width at which a product has half its speed",
    ),
    Parameter(
        "attention_efficiency", 0.45, 0.05, 0.9, 0.3, "", "share of peak of the attention kernel"
    ),
    Parameter(
        "memory_efficiency",
        0.75,
        0.2,
        1.0,
        0.2,
        "",
        "share of memory bandwidth of element-wise kernels",
    ),
    Parameter(
        "traffic_factor",
        1.0,
        0.3,
        3.0,
        0.3,
        "",
        "element-wise traffic relative to fused kernels",
    ),
    Parameter(
        "compiled_traffic",
        0.5,
        0.15,
        1.0,
        0.3,
        "",
        "element-wise traffic of compiled layers relative to eager ones",
    ),
    Parameter(
        "async_tp_exposed",
        0.5,
        0.05,
        1.0,
        0.4,
        "",
        "exposed share of tensor parallel traffic with asynchronous tp",
    ),
    Parameter("launch_s", 8e-4, 1e-5, 1e-2, 0.5, "s", "host time to launch one layer, forward"),
    Parameter(
        "launch_overlap",
        0.3,
        0.02,
        0.9,
        0.5,
        "",
        "exposed share of the shorter of host and device time",
    ),
    Parameter(
        "head_efficiency", 0.6, 0.1, 1.0, 0.3, "", "share of peak of the output head's products"
    ),
    Parameter(
        "unaligned_head",
        1.8,
        1.0,
        4.0,
        0.3,
        "",
        "slowdown of the head's products by an odd vocabulary",
    ),
    Parameter(
        "head_traffic",
        1.0,
        0.2,
        4.0,
        0.4,
        "",
        "passes over the logits relative to the loss model",
    ),
    Parameter(
        "intra_efficiency",
        0.75,
        0.2,
        1.0,
        0.2,
        "",
        "share of the intra-node link that collectives reach",
    ),
    Parameter(
        "inter_efficiency", 0.70, 0.1, 1.0, 0.3, "", "share of the network that collectives reach"
    ),
    Parameter(
        "intra_latency_s", 1.3e-5, 1e-6, 2e-4, 0.5, "s", "latency of a collective inside a node"
    ),
    Parameter(
        "inter_latency_s",
        3e-5,
        2e-6,
        1e-3,
        0.5,
        "s",
        "latency per collective and doubling of nodes",
    ),
    Parameter(
        "tp_exposed",
        0.7,
        0.05,
        1.0,
        0.4,
        "",
        "exposed share of tensor parallel traffic in the backward",
    ),
    Parameter("p2p_exposed", 0.8, 0.05, 2.0, 0.5, "", "exposed share of pipeline transfers"),
    Parameter("ep_exposed", 0.9, 0.05, 1.5, 0.3, "", "exposed share of expert all-to-alls"),
    Parameter(
        "jitter",
        0.006,
        0.0002,
        0.1,
        0.6,
        "",
        "waiting per doubling of nodes, as a share of compute",
    ),
    Parameter(
        "dp_overlap",
        0.8,
        0.05,
        1.0,
        0.2,
        "",
        "share of compute that can hide gradient and parameter traffic",
    ),
    Parameter(
        "overlap_slowdown",
        0.1,
        0.005,
        0.6,
        0.5,
        "",
        "slowdown of compute per hidden traffic",
    ),
    Parameter(
        "optimizer_efficiency",
        0.7,
        0.1,
        1.0,
        0.3,
        "",
        "share of memory bandwidth of the optimizer step",
    ),
    Parameter(
        "host_link_bytes_per_s", 2e10, 1e9, 5e11, 0.4, "B/s", "device to host copies, one direction"
    ),
    Parameter(
        "host_update_bytes_per_s",
        4e10,
        1e9,
        5e11,
        0.5,
        "B/s",
        "optimizer traffic on the host, per device",
    ),
    Parameter("nvme_bytes_per_s", 2.5e9, 1e8, 5e10, 0.5, "B/s", "storage, per device"),
    Parameter(
        "microbatch_s",
        1e-3,
        1e-5,
        5e-2,
        0.7,
        "s",
        "host time per micro-batch outside the layers",
    ),
    Parameter(
        "step_overhead_s", 5e-3, 1e-5, 2.0, 0.8, "s", "host time per step: data, logging, scalars"
    ),
)


def defaults(framework: str, device: Device) -> dict[str, float]:
    """Every parameter without calibration, for a framework and a device's generation."""
    general = {name: each.default for name, each in PARAMETERS.items()}
    return within_bounds(general | profile(framework, device))


def within_bounds(values: Mapping[str, float]) -> dict[str, float]:
    """The values, each limited to its parameter's bounds."""
    return {
        name: min(max(value, PARAMETERS[name].low), PARAMETERS[name].high)
        if name in PARAMETERS
        else value
        for name, value in values.items()
    }


def columns_for(
    requests: Sequence[Request], calibration: Calibration | None = None
) -> dict[str, Column]:
    """Parameters as columns, `()` if all requests agree, with the correction near calibrated runs.

    A calibration applies to the device and framework it was fitted to. Its device parameters also
    apply to other frameworks on that device; everything else is the default profile.
    """
    pairs: list[tuple[str, str]] = []
    values: list[Mapping[str, float]] = []
    points: list[tuple[Any, Any]] = []
    keys: list[int] = []
    norms: list[float] = []
    for request in requests:
        pair = (request.entry.name, request.framework.name)
        if pair not in pairs:
            pairs.append(pair)
            own = calibration.values_for(*pair) if calibration else {}
            values.append({**defaults(pair[1], request.entry), **own})
            group = calibration.group(*pair) if calibration else None
            timed = group is not None and group.timed > 0
            known = published(pair[1], request.entry) is not None
            norms.append(0.0 if timed else PUBLISHED_NORM if known else UNMEASURED_NORM)
            runs, weights = (group.points, group.weights) if group else ([], [])
            points.append(
                (np.array(runs, float).reshape(-1, len(LENGTHS)), np.array(weights, float))
            )
        keys.append(pairs.index(pair))
    corrections = columns(points, keys)
    limits = np.array([norms[key] for key in keys])
    corrections["peer_norm"] = limits if len(pairs) > 1 else np.asarray(max(norms, default=0.0))
    if len(pairs) <= 1:
        return {
            name: np.asarray(value) for each in values for name, value in each.items()
        } | corrections
    return {
        name: np.array([values[key][name] for key in keys]) for name in PARAMETERS
    } | corrections


def fixed_columns(table: Table, term: str, moved: Collection[str]) -> dict[str, Any]:
    """The table's columns and the terms under `term` that no parameter of `moved` affects."""
    known: dict[str, bool] = {}

    def moves(name: str) -> bool:
        if name not in known:
            inputs = () if table.is_input(name) else table.registry.terms[name].inputs
            known[name] = name in moved or any([moves(each) for each in inputs])
        return known[name]

    moves(term)
    return {name: table[name] for name, moving in known.items() if not moving}
