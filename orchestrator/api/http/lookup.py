"""One thing by its number, among those the caller may see; 404 for every other, whether it exists
or not.

Knows the selectors that scope by caller; does not act.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.api.http.auth import user
from orchestrator.api.http.problems import not_found
from orchestrator.common.errors import Refusal
from orchestrator.fleet import selectors as fleet
from orchestrator.planner.store import selectors as planner
from orchestrator.runs import selectors as runs

LARGEST = 2**63 - 1  # of a database key


def run_of(request: HttpRequest, id: int) -> Any:
    try:
        return runs.run_get(user=user(request), id=id)
    except Refusal:
        raise not_found("run", id, "/api/v1/runs") from None


def node_of(request: HttpRequest, id: str) -> Any:
    """By number or by name."""
    found = (
        None if id.isdecimal() and int(id) > LARGEST else fleet.node_get(user=user(request), id=id)
    )
    if found is None:
        raise not_found("node", id, "/api/v1/nodes")
    return found


def experiment_of(request: HttpRequest, id: int) -> Any:
    try:
        return runs.experiment_get(user=user(request), id=id)
    except Refusal:
        raise not_found("experiment", id, "/api/v1/experiments") from None


def calibration_of(request: HttpRequest, id: int) -> Any:
    try:
        return planner.calibration_by_number(user=user(request), id=id)
    except Refusal:
        raise not_found("calibration", id, "/api/v1/calibrations") from None


def device_type_of(request: HttpRequest, id: int) -> Any:
    try:
        return planner.device_type_get(user=user(request), id=id)
    except Refusal:
        raise not_found("device type", id, "/api/v1/device-types") from None


def saved_plan_of(request: HttpRequest, id: int) -> Any:
    try:
        return planner.saved_plan_get(user=user(request), id=id)
    except Refusal:
        raise not_found("saved plan", id, "/api/v1/plans") from None
