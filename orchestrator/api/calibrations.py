"""Calibrations of the planner, and devices of one's own: what makes predictions fit the machines
that people have.
"""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import Field

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.etags import check_version, tagged_answer, wanted_version
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import calibration_of, device_type_of, run_of
from orchestrator.api.http.pagination import Page, paged_query
from orchestrator.api.http.problems import invalid
from orchestrator.api.schemas import CalibrationOut, DeviceTypeOut, PageOf
from orchestrator.planner.store import selectors, services
from orchestrator.telemetry.outcome import measurement_lines
from workers.contracts.base import Contract
from workers.contracts.catalog.devices import Device

router = Router(tags=["planner"])
devices = Router(tags=["planner"])
MOST = 2000


class NewCalibration(Contract):
    """Measurement lines, or finished runs, or both."""

    name: Annotated[
        str, Field(max_length=120, description="its device and the day where left out")
    ] = ""
    measurements: Annotated[
        list[dict[str, Any]], Field(max_length=MOST, description="request lines with `measured`")
    ] = []
    runs: Annotated[
        list[int | str],
        Field(max_length=MOST, description="numbers of training runs and benchmarks that ended"),
    ] = []
    onto: Annotated[int | str | None, Field(description="an existing calibration to add to")] = None
    default: Annotated[
        bool, Field(description="let predictions of runs on this kind of device rest on it")
    ] = False


class CalibrationChange(Contract):
    default: bool


@router.get(
    "", response=PageOf[CalibrationOut], auth=needs("read"), summary="Calibrations, newest first"
)
def calibration_list(request: HttpRequest, page: Page) -> dict[str, Any]:
    rows = selectors.calibrations_visible_to(user=user(request))
    return paged_query(rows, page, "calibrations", selectors.calibration_answer, newest_first=True)


@router.post(
    "",
    response={201: CalibrationOut},
    auth=needs("runs"),
    summary="Fit the planner to what was measured",
)
@creates(CalibrationOut, location="/api/v1/calibrations/{id}")
def calibration_create(request: HttpRequest, body: NewCalibration) -> Any:
    """With `onto` an existing calibration is fitted anew with more lines; those with a known `id`
    replace the old.
    """
    who = user(request)
    lines = [dict(line) for line in body.measurements]
    for place, id in enumerate(body.runs):
        found = measurement_lines(run=run_of(request, _number(id, f"runs.{place}")))
        if isinstance(found, str):
            raise invalid(
                f"runs.{place}", found, "training runs that logged their steps, or benchmarks"
            )
        lines += found
    made = services.calibration_add(
        by=who,
        name=body.name,
        measurements=lines,
        default=body.default,
        devices=selectors.own_devices(user=who),
        onto=None if body.onto is None else selectors.calibration_get(user=who, id=body.onto),
    )
    return selectors.calibration_answer(made, whole=True)


@router.get(
    "/{int:id}",
    response=CalibrationOut,
    auth=needs("read"),
    summary="One calibration with its parameters",
)
def calibration(request: HttpRequest, id: int) -> HttpResponse:
    return _answer(request, calibration_of(request, id))


@router.patch(
    "/{int:id}",
    response=CalibrationOut,
    auth=needs("runs"),
    summary="Make it the default of its device",
)
def calibration_update(request: HttpRequest, id: int, body: CalibrationChange) -> HttpResponse:
    """With If-Match only if nobody else changed it since (412)."""
    found = calibration_of(request, id)
    check_version(wanted_version(request), found.version, f"Calibration {found.pk}")
    changed = services.calibration_set_default(
        calibration=found, by=user(request), default=body.default
    )
    return _answer(request, changed)


@router.delete(
    "/{int:id}", response={204: None}, auth=needs("runs"), summary="Delete a calibration"
)
def calibration_delete(request: HttpRequest, id: int) -> HttpResponse:
    services.calibration_delete(calibration=calibration_of(request, id), by=user(request))
    return HttpResponse(status=204)


@devices.get(
    "",
    response=PageOf[DeviceTypeOut],
    auth=needs("read"),
    summary="Kinds of devices described by people",
)
def device_type_list(request: HttpRequest, page: Page) -> dict[str, Any]:
    """Those of the catalogue are under `presets`, those that stand in nodes under `devices`."""
    rows = selectors.device_types_visible_to(user=user(request)).order_by("id")
    return paged_query(rows, page, "device-types", selectors.device_type_answer)


@devices.post(
    "",
    response={201: DeviceTypeOut},
    auth=needs("runs"),
    summary="Describe a kind of device to plan with",
)
@creates(DeviceTypeOut, location="/api/v1/device-types/{id}")
def device_type_create(request: HttpRequest, body: Device) -> Any:
    return selectors.device_type_answer(
        services.device_type_create(by=user(request), entry=body.to_dict())
    )


@devices.get("/{int:id}", response=DeviceTypeOut, auth=needs("read"), summary="One kind of device")
def device_type(request: HttpRequest, id: int) -> Any:
    return selectors.device_type_answer(device_type_of(request, id))


@devices.delete(
    "/{int:id}", response={204: None}, auth=needs("runs"), summary="Forget a kind of device"
)
def device_type_delete(request: HttpRequest, id: int) -> HttpResponse:
    services.device_type_delete(device_type=device_type_of(request, id), by=user(request))
    return HttpResponse(status=204)


def _number(id: int | str, field: str) -> int:
    text = str(id)
    if not text.isdecimal() or len(text) > 18:
        raise invalid(field, f"{text[:40]!r} is not a run's number", "12")
    return int(text)


def _answer(request: HttpRequest, row: Any) -> HttpResponse:
    body = CalibrationOut.model_validate(selectors.calibration_answer(row, whole=True)).model_dump(
        mode="json"
    )
    return tagged_answer(request, body, row.version)
