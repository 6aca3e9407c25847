"""Writes calibrations, own devices and saved plans. Fits nothing itself; knows no run.

Who may submit runs may add; who made a thing, or an operator, may change and delete it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from django.db import IntegrityError, transaction
from pydantic import ValidationError

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid
from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.models import Calibration, DeviceType, SavedPlan
from orchestrator.planner.plan_request import ParsedLine, ParseOptions
from orchestrator.planner.request_parsing import read
from workers.contracts.base import Problem, validation_problems
from workers.contracts.catalog.devices import DEVICES, Device

MOST_MEASUREMENTS = 2000
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
    """Fits parameters to measurement lines and keeps both; `onto` fits an existing calibration anew
    with more lines.

    A line with the `id` of one that is there replaces it. `default` makes predictions of runs on
    its device rest on it.
    Without a name it is called after its device and the day.
    Raises 422 with a sentence for each line that cannot be used, 403, 409 for a name that is taken.
    """
    accounts.require_role(by, Role.SUBMITTER, "calibrate the planner")
    if onto is not None:
        _require_owner(by, onto.created_by_id, "calibration", onto.name)
    name = _named(name or "unnamed") if onto is None else onto.name
    lines = [dict(each) for each in (onto.measurements if onto is not None else [])]
    known = {
        each.get("id"): place for place, each in enumerate(lines) if each.get("id") is not None
    }
    for each in measurements:
        if each.get("id") in known:
            lines[known[each["id"]]] = dict(each)
        else:
            lines.append(dict(each))
    asked = _usable(lines, ParseOptions(devices))
    document = fit(
        [(each.request, each.measured) for each in asked if each.request is not None]
    ).to_dict()
    requests = [each.request for each in asked if each.request is not None]
    values: dict[str, Any] = {
        "document": document,
        "measurements": lines,
        "rows": len(lines),
        "fitted": clock.now(),
        "device": _most([each.entry.name for each in requests]),
        "framework": _most([each.framework.name for each in requests]),
    }
    if onto is None and name == "unnamed":
        name = _free_name(values["device"])
    with transaction.atomic():
        if onto is None:
            row = _created(Calibration(name=name, created_by=by, created=clock.now(), **values))
        else:
            mine = Calibration.objects.filter(pk=onto.pk, version=onto.version)
            if not conditional.update(mine, version=onto.version + 1, **values):
                raise conflict(
                    f"The calibration {name} was changed meanwhile. Send it again.", retry=True
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
    """Predictions of runs on its device rest on it, or on no calibration any more."""
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
    """A device of one's own, a `Device` of the contracts.

    Raises 422, 409 for a name that is taken.
    """
    accounts.require_role(by, Role.SUBMITTER, "describe devices")
    try:
        device = Device.from_dict({"source": f"described by {by.username}", **entry})
    except ValidationError as error:
        raise _invalid(validation_problems(error)) from None
    name = _named(device.name)
    if name in DEVICES:
        raise invalid("name", f"{name!r} is in the catalogue already", f"{name}-own")
    if (
        not set(device.peak_tflops) & {"fp32", "bf16", "fp16"}
        or min(device.peak_tflops.values()) <= 0
    ):
        message = "a device has a peak above 0 for fp32, bf16 or fp16 at least"
        raise invalid("peak_tflops", message, '{"fp32": 19.5, "bf16": 312}')
    row = DeviceType(owner=by, name=name, entry=device.to_dict(), created=clock.now())
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError:
        raise conflict(
            f"You have a device {name!r} already. Delete it first.", type="name-taken"
        ) from None
    return row


def device_type_delete(*, device_type: DeviceType, by: User) -> None:
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
    """Keeps a request line that can be estimated, under a name.

    Raises 422 as an estimate would tell problems.
    """
    accounts.require_role(by, Role.SUBMITTER, "save plans")
    asked = read(line, ParseOptions(devices))
    if asked.problems:
        raise _invalid(asked.problems)
    return SavedPlan.objects.create(
        owner=by, name=_named(name, 160), line=dict(line), link=link[:2000]
    )


def plan_delete(*, plan: SavedPlan, by: User) -> None:
    _require_owner(by, plan.owner_id, "saved plan", plan.name)
    plan.delete()


def _usable(lines: Sequence[Mapping[str, Any]], options: ParseOptions) -> list[ParsedLine]:
    """Every line read; raises 422 naming those that cannot be."""
    if not lines:
        raise invalid(
            "measurements", "there is nothing to fit to", "lines with measured {step_time_s}"
        )
    if len(lines) > MOST_MEASUREMENTS:
        raise invalid(
            "measurements",
            f"{len(lines)} lines are more than {MOST_MEASUREMENTS}",
            "fewer, or the command",
        )
    found, problems = [], []
    for place, line in enumerate(lines):
        asked = read(line, options)
        problems += [
            item.model_copy(update={"field": f"measurements.{place}.{item.field}".rstrip(".")})
            for item in asked.problems
        ]
        if not asked.problems and not asked.measured:
            message = "the line has nothing measured"
            problems.append(
                Problem(
                    field=f"measurements.{place}.measured",
                    message=message,
                    hint='{"step_time_s": 1.2}',
                )
            )
        found.append(asked)
    if problems:
        raise _invalid(problems[:50])
    return found


def _invalid(problems: Sequence[Problem]) -> Refusal:
    first = "; ".join(str(item) for item in problems[:3])
    return Refusal("invalid", "The request is not valid", 422, first, problems)


def _created(row: Calibration) -> Calibration:
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError:
        detail = (
            f"There is a calibration {row.name!r} already. Choose another name, or add to that one."
        )
        raise conflict(detail, type="name-taken") from None
    return row


def _free_name(device: str) -> str:
    """`h100-80g, 1 March 2026`, with a number behind it where there are such."""
    today = clock.now()
    name = f"{device}, {today.day} {today:%B %Y}"
    taken = set(Calibration.objects.filter(name__startswith=name).values_list("name", flat=True))
    numbered = (f"{name} ({number})" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)


def _make_default(row: Calibration) -> None:
    Calibration.objects.filter(device=row.device, default=True).exclude(pk=row.pk).update(
        default=False
    )
    Calibration.objects.filter(pk=row.pk).update(default=True, version=row.version + 1)
    row.refresh_from_db()


def _named(name: Any, length: int = NAME_LENGTH) -> str:
    text = str(name).strip()
    if not 1 <= len(text) <= length or not text.isprintable():
        raise invalid("name", f"a name has 1 to {length} printable characters", "cluster in March")
    return text


def _most(names: Sequence[str]) -> str:
    return max(dict.fromkeys(names), key=list(names).count)


def _require_owner(by: User, owner_id: int, what: str, name: str) -> None:
    if by.pk != owner_id and not at_least(by.role, Role.OPERATOR):
        raise forbidden(
            f"The {what} {name!r} is somebody else's; its owner or an operator may change it."
        )
