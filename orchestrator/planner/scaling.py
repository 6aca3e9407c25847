"""Scaling laws: FLOPs, days, cost and energy of a training run, and what a budget can train.

Has its own term registry. These are rules of thumb; use the search for a real cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from orchestrator.planner.model.terms import Registry, Table, explain
from workers.contracts.base import Problem, problem

SCALING = Registry()
term, declare_inputs = SCALING.term, SCALING.declare_inputs
KAPLAN = "Kaplan et al. 2020, arXiv 2001.08361, section 2.1"
NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473, eq. 4"
HOFFMANN = "Hoffmann et al. 2022, arXiv 2203.15556"
_DAY_S = 86400.0

declare_inputs("parameters", "request", "parameters")
declare_inputs("tokens", "request", "tokens")
declare_inputs("", "request", "devices", "tokens_per_parameter", "flops_per_parameter_token")
declare_inputs("FLOP/s", "request: device peak · MFU", "flops_per_device")
declare_inputs("USD/h", "request or device catalogue", "usd_per_hour")
declare_inputs("W", "device catalogue", "power_w")
declare_inputs("days", "request", "budget_days")


@term("FLOP", "k · N · D, k = 6, or 8 with full recomputation", KAPLAN)
def total_flops(flops_per_parameter_token: Any, parameters: Any, tokens: Any) -> Any:
    """Training FLOPs."""
    return flops_per_parameter_token * parameters * tokens


@term("days", "k · N · D / (devices · FLOP/s) / 86400", NARAYANAN)
def days(total_flops: Any, devices: Any, flops_per_device: Any) -> Any:
    """Duration."""
    return total_flops / (devices * flops_per_device) / _DAY_S


@term("h", "devices · days · 24", "")
def device_hours(devices: Any, days: Any) -> Any:
    """Device-hours."""
    return devices * days * 24


@term("USD", "device hours · price", "")
def usd(device_hours: Any, usd_per_hour: Any) -> Any:
    """Cost."""
    return device_hours * usd_per_hour


@term("kWh", "device hours · power", "the device alone, without host and cooling")
def energy_kwh(device_hours: Any, power_w: Any) -> Any:
    """Energy of the devices."""
    return device_hours * power_w / 1000


@term("PFLOP/s-days", "FLOPs / (10^15 · 86400)", "Brown et al. 2020, arXiv 2005.14165, appendix D")
def petaflop_days(total_flops: Any) -> Any:
    """Compute in PFLOP/s-days."""
    return total_flops / (1e15 * _DAY_S)


@term("tokens", "tokens per parameter · N", f"{HOFFMANN}, table 3: about 20")
def optimal_tokens(tokens_per_parameter: Any, parameters: Any) -> Any:
    """Compute-optimal number of tokens."""
    return tokens_per_parameter * parameters


@term("FLOP", "devices · FLOP/s · budget days · 86400", "")
def budget_flops(devices: Any, flops_per_device: Any, budget_days: Any) -> Any:
    """FLOPs of the budget."""
    return devices * flops_per_device * budget_days * _DAY_S


@term("parameters", "√(C / (k · tokens per parameter))", f"{HOFFMANN}, approach 2 with D = r · N")
def budget_parameters(
    budget_flops: Any, flops_per_parameter_token: Any, tokens_per_parameter: Any
) -> Any:
    """Compute-optimal model size of the budget."""
    return np.sqrt(budget_flops / (flops_per_parameter_token * tokens_per_parameter))


@term("tokens", "r · N", HOFFMANN)
def budget_tokens(budget_parameters: Any, tokens_per_parameter: Any) -> Any:
    """Tokens for that model."""
    return budget_parameters * tokens_per_parameter


@term(
    "nats/token",
    "1.69 + 406.4 / N^0.34 + 410.7 / D^0.28",
    f"{HOFFMANN}, approach 3, on its own data",
)
def expected_loss(parameters: Any, tokens: Any) -> Any:
    """Predicted loss."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def scaling(
    *,
    parameters: float | None = None,
    tokens: float | None = None,
    devices: float = 1,
    flops_per_device: float,
    budget_days: float | None = None,
    tokens_per_parameter: float = 20.0,
    recompute: bool = False,
    usd_per_hour: float = 0.0,
    power_w: float = 0.0,
    explained: bool = False,
) -> dict[str, Any]:
    """From `parameters` (tokens default to the optimum) to cost, or from `budget_days` to a model.

    Returns `{ok, problems, …}` with `total_flops, days, device_hours, usd, energy_kwh,
    petaflop_days, optimal_tokens, expected_loss` for parameters, and `budget_flops,
    budget_parameters, budget_tokens` for a budget. With `explained` each number is a tree.
    """
    columns: dict[str, Any] = {
        "devices": devices,
        "flops_per_device": flops_per_device,
        "tokens_per_parameter": tokens_per_parameter,
        "flops_per_parameter_token": 8.0 if recompute else 6.0,
        "usd_per_hour": usd_per_hour,
        "power_w": power_w,
    }
    names: list[str] = []
    if parameters is not None:
        columns |= {"parameters": parameters, "tokens": tokens or tokens_per_parameter * parameters}
        names += [
            "total_flops",
            "days",
            "device_hours",
            "usd",
            "energy_kwh",
            "petaflop_days",
            "optimal_tokens",
            "expected_loss",
        ]
    if budget_days is not None:
        columns["budget_days"] = budget_days
        names += ["budget_flops", "budget_parameters", "budget_tokens"]
    problems = _problems(columns)
    if not names:
        problems.append(
            problem(
                "parameters", "parameters and budget_days are both missing", "Use parameters 7e9."
            )
        )
    if problems:
        return {"ok": False, "problems": [item.to_dict() for item in problems]}
    table = Table({name: float(value) for name, value in columns.items()}, 1, SCALING)
    numbers: dict[str, Any] = {name: float(table[name]) for name in names}
    if explained:
        numbers = {name: explain(table, name).to_dict() for name in names}
    inputs = (
        {"parameters": parameters, "tokens": columns.get("tokens")}
        if parameters is not None
        else {}
    )
    return {"ok": True, "problems": [], **inputs, **numbers}


def _problems(columns: Mapping[str, Any]) -> list[Problem]:
    may_be_zero = ("usd_per_hour", "power_w")
    return [
        problem(name, f"{name} is {value:g}; it must be greater than 0", "Use a number such as 1.")
        for name, value in columns.items()
        if not math.isfinite(value) or (value < 0 if name in may_be_zero else value <= 0)
    ]
