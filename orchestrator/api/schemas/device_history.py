"""Answers of the history of nodes and of the fleet, of idle devices, and of energy."""

from __future__ import annotations

from ninja import Field, Schema

from orchestrator.api.schemas.base import Id, Time

Values = list[float | None]


class Statistics(Schema):
    """One value per time; null: no reading. `min` and `max` are of single readings."""

    mean: Values
    min: Values
    max: Values


class DeviceSeries(Schema):
    """Series of one device by metric; metrics without a reading are left out."""

    index: int
    series: dict[str, Statistics] = Field(
        description="utilization (fraction), memory_used_bytes, power_w, temperature_c"
    )


class NodeHistoryOut(Schema):
    """Readings of a node and its devices over time."""

    node: str
    step_s: int = Field(description="seconds between two times")
    times: list[int] = Field(description="begin of each column, Unix seconds")
    devices: list[DeviceSeries]
    series: dict[str, Statistics] = Field(
        description="of the node: cpu_utilization, memory_used_bytes, power_w (CPUs), "
        "temperature_c, received_bytes_per_s, sent_bytes_per_s, rdma_received_bytes_per_s, "
        "rdma_sent_bytes_per_s"
    )


class FleetHistoryOut(Schema):
    """Sums over all devices of the fleet, or of one pool, over time."""

    step_s: int
    times: list[int] = Field(description="begin of each column, Unix seconds")
    devices: Values = Field(description="devices with readings")
    allocated: Values = Field(description="devices that attempts held")
    busy: Values = Field(description="allocated devices that worked in the minute")
    idle: Values = Field(description="allocated devices below 5% utilization all minute")
    utilization: Values = Field(description="mean of the devices with readings, a fraction")
    power_w: Values = Field(description="of the devices whose power is measured")
    measured: Values = Field(description="devices whose power is measured")
    energy_kwh: float | None = Field(
        description="of the machines in the period, without ORRERY_PUE; null: not measured"
    )


class IdleRunOut(Schema):
    """The run that holds the device."""

    id: Id
    name: str
    kind: str
    state: str
    owner: str


class IdleDeviceOut(Schema):
    """An allocated device without work for ten minutes or more."""

    node: str
    index: int
    pool: str
    since: Time
    idle_s: float
    run: IdleRunOut | None = Field(description="null: a run that you may not see")


class IdleDevicesOut(Schema):
    """Idle allocated devices, longest first."""

    items: list[IdleDeviceOut]
    device_s: float = Field(description="device-seconds for which they have been idle")


class EnergyRowOut(Schema):
    """Use of one group; times are sums over its devices."""

    key: str = Field(description="name of the group, or a run's id; empty: without one")
    name: str = Field(description="of a run, else empty")
    person: str = Field(description="of a run, else empty")
    device_s: float = Field(description="allocated time with readings")
    idle_s: float = Field(description="of this, minutes below 5% utilization")
    utilization: float | None
    measured_s: float = Field(description="time with a power reading, which the energy is of")
    energy_kwh: float | None = Field(
        description="of the site: measured energy times `pue`; null: no power was measured"
    )
    co2_kg: float | None


class EnergyOut(Schema):
    """Rows by falling energy. A person in several teams counts for each of them."""

    by: str
    pue: float
    co2_g_per_kwh: float
    items: list[EnergyRowOut]
    total: EnergyRowOut
