"""Writes calibrations, own devices and saved plans.

Submitters may add; the owner or an operator may change and delete. Does not depend on runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from django.db import IntegrityError, transaction
from pydantic import ValidationError

from orchestrator.accounts import services as accounts
from orchestrator.accounts import teams
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional
from orchestrator.common.errors import conflict, forbidden, invalid, invalid_document
from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.models import Calibration, DeviceType, SavedPlan
from orchestrator.planner.plan_request import ParseOptions
from orchestrator.planner.request_parsing import parse_line
from workers.contracts.base import problem, validation_problems
from workers.contracts.catalog.devices import DEVICES, Device

MAX_MEASUREMENTS = 2000
NAME_LENGTH = 120


def calibration_add(
    *,
    by: User,
    name: str,
    measurements: Sequence[Mapping[str, Any]],
    devices: Mapping[str, Device] | None = None,
    onto: Calibration | None = None,
    default: bool = False,
) -> Calibration:
    """Fits parameters to measurement lines and stores both.

    `onto` adds the lines to an existing calibration and fits it again; a line replaces the one with
    the same `id`. `default` uses it for predictions of runs on its device. The default name is the
    device and the date. Raises 403, 409 for a name that is taken, and 422 with a problem for each
    unusable line.
    """
    accounts.require_role(by, Role.SUBMITTER, "calibrate the planner")
    if onto is not None:
        _require_owner(by, onto.created_by_id, "calibration", onto.name)
    name = _validated_name(name or "unnamed") if onto is None else onto.name
    lines = [dict(line) for line in (onto.measurements if onto is not None else [])]
    known = {
        line.get("id"): index for index, line in enumerate(lines) if line.get("id") is not None
    }
    for line in measurements:
        if line.get("id") in known:
            lines[known[line["id"]]] = dict(line)
        else:
            lines.append(dict(line))
    pairs = _parse_measurements(lines, ParseOptions(devices or {}))
    requests = [request for request, _ in pairs]
    values: dict[str, Any] = {
        "document": fit(pairs).to_dict(),
        "measurements": lines,
        "rows": len(lines),
        "fitted": clock.now(),
        "device": _most_frequent([request.entry.name for request in requests]),
        "framework": _most_frequent([request.framework.name for request in requests]),
    }
    if onto is None and name == "unnamed":
        name = _free_name(values["device"])
    with transaction.atomic():
        if onto is None:
            row = _create(Calibration(name=name, created_by=by, created=clock.now(), **values))
        else:
            unchanged = Calibration.objects.filter(pk=onto.pk, version=onto.version)
            if not conditional.update(unchanged, version=onto.version + 1, **values):
                raise conflict(
                    f"The calibration {name} was changed in the meantime. Send it again.",
                    retry=True,
                )
            row = Calibration.objects.get(pk=onto.pk)
        if default:
            _make_default(row)
        accounts.audit(
            actor=by,
            action="calibration.fit",
            target=f"calibration:{row.pk}",
            data={"rows": len(lines)},
        )
    return row


def calibration_set_default(
    *, calibration: Calibration, by: User, default: bool = True
) -> Calibration:
    """Makes it the default for predictions on its device, or removes the default."""
    _require_owner(by, calibration.created_by_id, "calibration", calibration.name)
    with transaction.atomic():
        if default:
            _make_default(calibration)
        else:
            Calibration.objects.filter(pk=calibration.pk).update(
                default=False, version=calibration.version + 1
            )
        accounts.audit(
            actor=by,
            action="calibration.default",
            target=f"calibration:{calibration.pk}",
            data={"default": default},
        )
    calibration.refresh_from_db()
    return calibration


def calibration_delete(*, calibration: Calibration, by: User) -> None:
    """Deletes a calibration. Raises 403."""
    _require_owner(by, calibration.created_by_id, "calibration", calibration.name)
    with transaction.atomic():
        accounts.audit(
            actor=by,
            action="calibration.delete",
            target=f"calibration:{calibration.pk}",
            data={"name": calibration.name},
        )
        calibration.delete()


def device_type_create(*, by: User, entry: Mapping[str, Any]) -> DeviceType:
    """Adds an own device, a `Device` of the contracts. Raises 422, 409 for a name that is taken."""
    accounts.require_role(by, Role.SUBMITTER, "add devices")
    try:
        device = Device.from_dict({"source": f"described by {by.username}", **entry})
    except ValidationError as error:
        raise invalid_document(validation_problems(error)) from None
    name = _validated_name(device.name)
    if name in DEVICES:
        raise invalid("name", f"{name!r} is already in the catalogue", f"Use {name}-own.")
    if (
        not set(device.peak_tflops) & {"fp32", "bf16", "fp16"}
        or min(device.peak_tflops.values()) <= 0
    ):
        message = "a device needs a peak above 0 for fp32, bf16 or fp16"
        raise invalid("peak_tflops", message, 'Use {"fp32": 19.5, "bf16": 312}.')
    row = DeviceType(owner=by, name=name, entry=device.to_dict(), created=clock.now())
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError:
        raise conflict(
            f"You already have a device {name!r}. Delete it first.", type="name-taken"
        ) from None
    return row


def device_type_delete(*, device_type: DeviceType, by: User) -> None:
    """Deletes an own device. Raises 403."""
    _require_owner(by, device_type.owner_id, "device", device_type.name)
    device_type.delete()


def plan_save(
    *,
    by: User,
    name: str,
    line: Mapping[str, Any],
    link: str = "",
    devices: Mapping[str, Device] | None = None,
) -> SavedPlan:
    """Saves a valid request line under a name. Raises 422 with the problems of an estimate."""
    accounts.require_role(by, Role.SUBMITTER, "save plans")
    parsed = parse_line(line, ParseOptions(devices or {}))
    if parsed.problems:
        raise invalid_document(parsed.problems)
    return SavedPlan.objects.create(
        owner=by, name=_validated_name(name, 160), line=dict(line), link=link[:2000]
    )


def plan_delete(*, plan: SavedPlan, by: User) -> None:
    """Deletes a saved plan. Raises 403."""
    _require_owner(by, plan.owner_id, "saved plan", plan.name)
    plan.delete()


def _parse_measurements(
    lines: Sequence[Mapping[str, Any]], options: ParseOptions
) -> list[tuple[Request, dict[str, Any]]]:
    """`(request, measured)` of every line. Raises 422 with the problems of unusable lines."""
    if not lines:
        raise invalid(
            "measurements", "there are no lines to fit", "Use lines with measured {step_time_s}."
        )
    if len(lines) > MAX_MEASUREMENTS:
        raise invalid(
            "measurements",
            f"there are {len(lines)} lines, the limit is {MAX_MEASUREMENTS}",
            "Use fewer lines, or manage.py calibrate.",
        )
    pairs, problems = [], []
    for index, line in enumerate(lines):
        parsed = parse_line(line, options)
        problems += [
            item.model_copy(update={"field": f"measurements.{index}.{item.field}".rstrip(".")})
            for item in parsed.problems
        ]
        if not parsed.problems and not parsed.measured:
            field = f"measurements.{index}.measured"
            problems.append(
                problem(field, "the line has no measured value", 'Use {"step_time_s": 1.2}.')
            )
        if parsed.request is not None:
            pairs.append((parsed.request, parsed.measured))
    if problems:
        raise invalid_document(problems[:50])
    return pairs


def _create(row: Calibration) -> Calibration:
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError:
        detail = f"The calibration {row.name!r} already exists. Choose another name, or add to it."
        raise conflict(detail, type="name-taken") from None
    return row


def _free_name(device: str) -> str:
    """`h100-80g, 1 March 2026`, followed by a number if that name is taken."""
    today = clock.now()
    name = f"{device}, {today.day} {today:%B %Y}"
    taken = set(Calibration.objects.filter(name__startswith=name).values_list("name", flat=True))
    numbered = (f"{name} ({number})" for number in count(2))
    return next(item for item in chain([name], numbered) if item not in taken)


def _make_default(row: Calibration) -> None:
    Calibration.objects.filter(device=row.device, default=True).exclude(pk=row.pk).update(
        default=False
    )
    Calibration.objects.filter(pk=row.pk).update(default=True, version=row.version + 1)
    row.refresh_from_db()


def _validated_name(name: Any, length: int = NAME_LENGTH) -> str:
    text = str(name).strip()
    if not 1 <= len(text) <= length or not text.isprintable():
        raise invalid(
            "name",
            f"a name has 1 to {length} printable characters",
            "Use a name such as cluster in March.",
        )
    return text


def _most_frequent(names: Sequence[str]) -> str:
    return max(dict.fromkeys(names), key=list(names).count)


def _require_owner(by: User, owner_id: int, what: str, name: str) -> None:
    if by.pk != owner_id and not teams.manages(by, owner_id):
        raise forbidden(f"Only its owner or an operator may change the {what} {name!r}.")
