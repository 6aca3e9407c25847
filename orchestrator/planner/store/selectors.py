"""Reads calibrations, own devices and saved plans.

Every active user sees all calibrations; devices and plans are visible to the owner's team.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from orchestrator.accounts import selectors as accounts
from orchestrator.accounts.models import User
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.planner.models import Calibration, DeviceType, SavedPlan
from workers.contracts.catalog.devices import Device


def calibrations_visible_to(*, user: User) -> QuerySet[Calibration]:
    """All calibrations, newest first, without documents and measurements."""
    rows = (
        Calibration.objects.select_related("created_by")
        .defer("document", "measurements")
        .order_by("-id")
    )
    return rows if user.is_active else rows.none()


def calibration_by_id(*, user: User, id: int | str) -> Calibration:
    """By id. Raises 404."""
    rows = Calibration.objects.select_related("created_by")
    row = rows.filter(pk=int(id)).first() if is_id(id) and user.is_active else None
    if row is None:
        raise missing_object("calibration", id)
    return row


def calibration_get(*, user: User, id: int | str) -> Calibration:
    """By id or name. Raises 404."""
    rows = Calibration.objects.select_related("created_by").order_by("id")
    row = rows.filter(name=str(id)).first() or (
        rows.filter(pk=int(id)).first() if is_id(id) else None
    )
    if row is None or not user.is_active:
        raise missing_object("calibration", id)
    return row


def calibration_default(*, device: str) -> Calibration | None:
    """The default calibration for predictions on this device, or None."""
    return Calibration.objects.filter(device=device, default=True).first()


def device_types_visible_to(*, user: User) -> QuerySet[DeviceType]:
    """Devices of the user and their teams, by name."""
    rows = DeviceType.objects.select_related("owner").order_by("name", "id")
    owners = accounts.visible_owners(user)
    return rows if owners is None else rows.filter(owner_id__in=owners)


def device_type_get(*, user: User, id: int | str) -> DeviceType:
    """By id. Raises 404."""
    row = device_types_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("device type", id)
    return row


def own_devices(*, user: User) -> dict[str, Device]:
    """Devices that the user's requests may name; the user's own take precedence."""
    rows = sorted(device_types_visible_to(user=user), key=lambda row: row.owner_id == user.pk)
    return {row.name: Device.from_dict(row.entry) for row in rows}


def saved_plans_visible_to(*, user: User) -> QuerySet[SavedPlan]:
    """Saved plans of the user and their teams, newest first."""
    rows = SavedPlan.objects.select_related("owner").order_by("-id")
    owners = accounts.visible_owners(user)
    return rows if owners is None else rows.filter(owner_id__in=owners)


def saved_plan_get(*, user: User, id: int | str) -> SavedPlan:
    """By id. Raises 404."""
    row = saved_plans_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("saved plan", id)
    return row


def serialize_calibration(row: Calibration, *, with_document: bool = False) -> dict[str, Any]:
    """The REST representation, optionally with the fitted document."""
    fields: dict[str, Any] = {
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
    return fields | {"document": row.document} if with_document else fields


def serialize_device_type(row: DeviceType) -> dict[str, Any]:
    """The REST representation."""
    return {
        "id": str(row.pk),
        "name": row.name,
        "owner": row.owner.username,
        "created": iso(row.created),
        "entry": row.entry,
    }


def serialize_saved_plan(row: SavedPlan) -> dict[str, Any]:
    """The REST representation."""
    return {
        "id": str(row.pk),
        "name": row.name,
        "owner": row.owner.username,
        "created": iso(row.created),
        "line": row.line,
        "link": row.link or None,
    }
