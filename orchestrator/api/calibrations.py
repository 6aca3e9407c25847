"""Calibrations of the planner, and user-defined device types."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.etags import check_version, etag_response, if_match_version
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_calibration, get_device_type, get_run
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.problems import invalid
from orchestrator.api.schemas.plans import CalibrationOut, DeviceTypeOut
from orchestrator.planner.store import selectors, services
from orchestrator.telemetry.outcome import measurement_lines
from workers.contracts.base import Contract
from workers.contracts.catalog.devices import Device

router = Router(tags=["planner"])
devices = Router(tags=["planner"])
MAX_ITEMS = 2000


class NewCalibration(Contract):
    """A calibration to fit, from measurement lines, finished runs, or both."""

    name: Annotated[str, Field(max_length=120, description="default: device and date")] = ""
    measurements: Annotated[
        list[dict[str, Any]],
        Field(max_length=MAX_ITEMS, description="request lines with `measured`"),
    ] = []
    runs: Annotated[
        list[int | str],
        Field(max_length=MAX_ITEMS, description="ids of ended training runs and benchmarks"),
    ] = []
    onto: Annotated[int | str | None, Field(description="an existing calibration to add to")] = None
    default: Annotated[bool, Field(description="use it for predictions of runs on this device")] = (
        False
    )


class CalibrationChange(Contract):
    """The fields to change."""

    default: bool


@router.get(
    "",
    response=list[CalibrationOut],
    auth=require_scope("read"),
    summary="List calibrations",
)
@paginated(
    name="calibrations",
    serialize=selectors.serialize_calibration,
    newest_first=True,
)
def calibration_list(request: HttpRequest) -> Any:
    """Calibrations, newest first, without their parameters."""
    return selectors.calibrations_visible_to(user=user(request))


@router.post(
    "",
    response={201: CalibrationOut},
    auth=require_scope("runs"),
    summary="Create a calibration",
)
@creates(CalibrationOut, location="/api/v1/calibrations/{id}")
def calibration_create(request: HttpRequest, body: NewCalibration) -> Any:
    """Fits the planner's parameters to measurements.

    With `onto`, refits an existing calibration with more lines; a line with a known `id` replaces
    the old one.
    """
    by = user(request)
    lines = [dict(line) for line in body.measurements]
    for index, id in enumerate(body.runs):
        measured = measurement_lines(run=get_run(request, _run_id(id, f"runs.{index}")))
        if isinstance(measured, str):
            raise invalid(
                f"runs.{index}", measured, "Use training runs with logged steps, or benchmarks."
            )
        lines += measured
    calibration = services.calibration_add(
        by=by,
        name=body.name,
        measurements=lines,
        default=body.default,
        devices=selectors.own_devices(user=by),
        onto=None if body.onto is None else selectors.calibration_get(user=by, id=body.onto),
    )
    return selectors.serialize_calibration(calibration, with_document=True)


@router.get(
    "/{int:id}",
    response=CalibrationOut,
    auth=require_scope("read"),
    summary="Get a calibration",
)
def calibration(request: HttpRequest, id: int) -> HttpResponse:
    """One calibration with its parameters and an ETag."""
    return _response(request, get_calibration(request, id))


@router.patch(
    "/{int:id}",
    response=CalibrationOut,
    auth=require_scope("runs"),
    summary="Update a calibration",
)
def calibration_update(request: HttpRequest, id: int, body: CalibrationChange) -> HttpResponse:
    """Makes it the default of its device, or not. With If-Match: 412 if it was edited since."""
    row = get_calibration(request, id)
    check_version(if_match_version(request), row.version, f"Calibration {row.pk}")
    changed = services.calibration_set_default(
        calibration=row, by=user(request), default=body.default
    )
    return _response(request, changed)


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete a calibration"
)
def calibration_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the calibration. Existing predictions keep their values."""
    services.calibration_delete(calibration=get_calibration(request, id), by=user(request))
    return HttpResponse(status=204)


@devices.get(
    "",
    response=list[DeviceTypeOut],
    auth=require_scope("read"),
    summary="List device types",
)
@paginated(name="device-types", serialize=selectors.serialize_device_type)
def device_type_list(request: HttpRequest) -> Any:
    """User-defined device types. `presets` lists the catalogue, `devices` the fleet's devices."""
    return selectors.device_types_visible_to(user=user(request)).order_by("id")


@devices.post(
    "",
    response={201: DeviceTypeOut},
    auth=require_scope("runs"),
    summary="Create a device type",
)
@creates(DeviceTypeOut, location="/api/v1/device-types/{id}")
def device_type_create(request: HttpRequest, body: Device) -> Any:
    """Defines a device type for the planner."""
    return selectors.serialize_device_type(
        services.device_type_create(by=user(request), entry=body.to_dict())
    )


@devices.get(
    "/{int:id}", response=DeviceTypeOut, auth=require_scope("read"), summary="Get a device type"
)
def device_type(request: HttpRequest, id: int) -> Any:
    """One user-defined device type."""
    return selectors.serialize_device_type(get_device_type(request, id))


@devices.delete(
    "/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete a device type"
)
def device_type_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the device type."""
    services.device_type_delete(device_type=get_device_type(request, id), by=user(request))
    return HttpResponse(status=204)


def _run_id(id: int | str, field: str) -> int:
    text = str(id)
    if not text.isdecimal() or len(text) > 18:
        raise invalid(field, f"{text[:40]!r} is not a run id", "Use an integer such as 12.")
    return int(text)


def _response(request: HttpRequest, row: Any) -> HttpResponse:
    body = CalibrationOut.model_validate(
        selectors.serialize_calibration(row, with_document=True)
    ).model_dump(mode="json")
    return etag_response(request, body, row.version)
