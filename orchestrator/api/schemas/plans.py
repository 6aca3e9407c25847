"""Responses of the planner: presets, device types, calibrations, estimates, searches, exports."""

from __future__ import annotations

from typing import Any

from ninja import Schema
from pydantic import ConfigDict, Field

from orchestrator.api.schemas.base import Id, Time


class Preset(Schema):
    """A model preset."""

    name: str
    parameters: int | None = None
    spec: dict[str, Any]


class PresetsOut(Schema):
    """What a spec can name."""

    models: list[Preset]
    devices: list[dict[str, Any]]
    data: list[str]


class CalibrationOut(Schema):
    """Parameters of the planner, fitted to measurements."""

    id: Id
    name: str
    device: str = Field(description="catalogue name in most of its measurements")
    framework: str
    rows: int = Field(description="number of measurements")
    default: bool = Field(description="used for predictions of runs on its device")
    created_by: str
    created: Time
    fitted: Time
    version: int
    document: dict[str, Any] | None = Field(
        None, description="in the format of `manage.py calibrate`; null in lists"
    )


class DeviceTypeOut(Schema):
    """A user-defined device type."""

    id: Id
    name: str
    owner: str
    created: Time
    entry: dict[str, Any] = Field(json_schema_extra={"x-contract": "Device"})


class SavedPlanOut(Schema):
    """A plan request saved under a name."""

    id: Id
    name: str
    owner: str
    created: Time
    line: dict[str, Any] = Field(description="a request line for plans/estimate")
    link: str | None


class EstimateOut(Schema):
    """An estimate; with `explain`, numbers are trees `{name, value, unit, formula, inputs,
    source}`.
    """

    model_config = ConfigDict(extra="allow")

    id: Any = None
    ok: bool = Field(True, description="the plan is legal")
    problems: list[dict[str, str]] = Field(
        [], description="[{field, message, hint}] of an illegal plan"
    )
    fits: bool | None = None
    memory: dict[str, Any] | None = Field(
        None, description="bytes by category on the worst pipeline rank, and totals"
    )
    host: dict[str, Any] | None = Field(
        None, description="bytes that offloading places in host memory, per device"
    )
    step_time_s: Any = None
    step_time_low_s: Any = Field(None, description="with step_time_high_s, an 80% interval")
    step_time_high_s: Any = None
    time: dict[str, Any] | None = None
    tokens_per_s_per_device: Any = None
    tflops_per_device: Any = Field(None, description="model FLOPs")
    mfu: Any = None
    hfu: Any = None
    bubble_fraction: Any = None
    comm: dict[str, Any] | None = Field(
        None, description="bytes per device and step, by kind of parallelism"
    )
    collectives: dict[str, Any] | None = Field(
        None,
        description=("bytes that a rank passes to each kind of collective; null if not counted"),
    )
    notes: list[str] = Field([], description="what to know before you use the plan")
    explained: dict[str, Any] | None = Field(
        None, description="trees of the numbers named in `explain`"
    )
    usd_per_billion_tokens: Any = None
    days: Any = Field(None, description="for workload.tokens; null without it")
    calibration: str | None = None
    answers: list[dict[str, Any]] | None = Field(None, description="one per line of `requests`")


class SearchOut(Schema):
    """The best plans of a search."""

    model_config = ConfigDict(extra="allow")

    enumerated: int = Field(description="legal candidates")
    legal: int
    fit: int
    seconds: float
    plans: list[dict[str, Any]] = Field(description="[{plan, …the estimate}], best first")
    pareto: list[int] = Field(description="positions in `plans`")
    rejected: dict[str, int] = Field(description="number of excluded plans by reason")
    notes: list[str] = Field(
        [], description="what the search excluded, and what to know about its plans"
    )
    closest: dict[str, Any] | None = Field(
        None, description="if nothing fits: the plan that needs the least memory"
    )
    advice: list[dict[str, Any]] | None = Field(
        None, description="if nothing fits: single changes that would make a plan fit"
    )
    rollout_devices: int | None = Field(
        None, description='with rollout.devices "auto": the devices for rollouts, best split'
    )
    splits: list[dict[str, Any]] | None = Field(
        None,
        description="the compared splits: [{training, rollouts, plan, step_time_s, fits}]",
    )


class ExportOut(Schema):
    """A plan in another engine's configuration format."""

    engine: str
    filename: str
    text: str
    notes: list[str]


class ServingOut(Schema):
    """Predicted performance of serving a model."""

    model_config = ConfigDict(extra="allow")
