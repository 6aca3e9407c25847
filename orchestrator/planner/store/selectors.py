"""Reads calibrations, own devices and saved plans.

Who logs in sees every calibration; the rest is a team's own.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common.errors import not_found
from orchestrator.common.units import is_id, iso
from orchestrator.planner.models import Calibration, DeviceType, SavedPlan
from workers.contracts.catalog.devices import Device


def calibrations_visible_to(*, user: User) -> QuerySet[Calibration]:
    """Newest first, without their documents and measurements."""
    found = (
        Calibration.objects.select_related("created_by")
        .defer("document", "measurements")
        .order_by("-id")
    )
    return found if user.is_active else found.none()


def calibration_by_number(*, user: User, id: int | str) -> Calibration:
    """Raises 404."""
    rows = Calibration.objects.select_related("created_by")
    found = rows.filter(pk=int(id)).first() if is_id(id) and user.is_active else None
    if found is None:
        raise not_found("calibration", id)
    return found


def calibration_get(*, user: User, id: int | str) -> Calibration:
    """By number or by name. Raises 404."""
    rows = Calibration.objects.select_related("created_by").order_by("id")
    found = rows.filter(name=str(id)).first() or (
        rows.filter(pk=int(id)).first() if is_id(id) else None
    )
    if found is None or not user.is_active:
        raise not_found("calibration", id)
    return found


def calibration_default(*, device: str) -> Calibration | None:
    """What predictions for this kind of device rest on; None: the catalogue and the planner's own
    defaults.
    """
    return Calibration.objects.filter(device=device, default=True).first()


def device_types_visible_to(*, user: User) -> QuerySet[DeviceType]:
    """By name: one's own and team mates'."""
    found = DeviceType.objects.select_related("owner").order_by("name", "id")
    owners = people.visible_owners(user)
    return found if owners is None else found.filter(owner_id__in=owners)


def device_type_get(*, user: User, id: int | str) -> DeviceType:
    """By number. Raises 404."""
    found = device_types_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if found is None:
        raise not_found("device type", id)
    return found


def own_devices(*, user: User) -> dict[str, Device]:
    """Catalogue entries that requests of this person may name, by name; one's own before a team
    mate's.
    """
    rows = sorted(device_types_visible_to(user=user), key=lambda row: row.owner_id == user.pk)
    return {row.name: Device.from_dict(row.entry) for row in rows}


def saved_plans_visible_to(*, user: User) -> QuerySet[SavedPlan]:
    """Newest first: one's own and team mates'."""
    found = SavedPlan.objects.select_related("owner").order_by("-id")
    owners = people.visible_owners(user)
    return found if owners is None else found.filter(owner_id__in=owners)


def saved_plan_get(*, user: User, id: int | str) -> SavedPlan:
    """By number. Raises 404."""
    found = saved_plans_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if found is None:
        raise not_found("saved plan", id)
    return found


def calibration_answer(row: Calibration, *, whole: bool = False) -> dict[str, Any]:
    """The REST shape; `whole` with the fitted document."""
    found: dict[str, Any] = {
        "id": str(row.pk),
        "name": row.name,
        "device": row.device,
        "framework": row.framework,
        "rows": row.rows,
        "default": row.default,
        "created_by": row.created_by.username,
        "created": iso(row.created),
        "fitted": iso(row.fitted),
        "version": row.version,
    }
    return found | {"document": row.document} if whole else found


def device_type_answer(row: DeviceType) -> dict[str, Any]:
    return {
        "id": str(row.pk),
        "name": row.name,
        "owner": row.owner.username,
        "created": iso(row.created),
        "entry": row.entry,
    }


def saved_plan_answer(row: SavedPlan) -> dict[str, Any]:
    return {
        "id": str(row.pk),
        "name": row.name,
        "owner": row.owner.username,
        "created": iso(row.created),
        "line": row.line,
        "link": row.link or None,
    }
