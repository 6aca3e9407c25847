"""Looks up one object by id among those that the caller may see; 404 for all others."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.api.http.auth import user
from orchestrator.api.http.problems import missing_object
from orchestrator.common.errors import Refusal
from orchestrator.fleet import selectors as fleet
from orchestrator.planner.store import selectors as planner
from orchestrator.runs import selectors as runs
from orchestrator.sweeps import selectors as sweeps

MAX_ID = 2**63 - 1  # largest database key


def get_run(request: HttpRequest, id: int) -> Any:
    """The run with this id; 404 if the caller may not see it."""
    try:
        return runs.run_get(user=user(request), id=id)
    except Refusal:
        raise missing_object("run", id, "/api/v1/runs") from None


def get_node(request: HttpRequest, id: str) -> Any:
    """The node with this id or name; 404 if it does not exist."""
    node = (
        None if id.isdecimal() and int(id) > MAX_ID else fleet.node_get(user=user(request), id=id)
    )
    if node is None:
        raise missing_object("node", id, "/api/v1/nodes")
    return node


def get_experiment(request: HttpRequest, id: int) -> Any:
    """The experiment with this id; 404 if the caller may not see it."""
    try:
        return runs.experiment_get(user=user(request), id=id)
    except Refusal:
        raise missing_object("experiment", id, "/api/v1/experiments") from None


def get_sweep(request: HttpRequest, id: int) -> Any:
    """The sweep with this id; 404 if the caller may not see it."""
    try:
        return sweeps.sweep_get(user=user(request), id=min(id, MAX_ID))
    except Refusal:
        raise missing_object("sweep", id, "/api/v1/sweeps") from None


def get_calibration(request: HttpRequest, id: int) -> Any:
    """The calibration with this id; 404 if it does not exist."""
    try:
        return planner.calibration_by_id(user=user(request), id=id)
    except Refusal:
        raise missing_object("calibration", id, "/api/v1/calibrations") from None


def get_device_type(request: HttpRequest, id: int) -> Any:
    """The device type with this id; 404 if the caller may not see it."""
    try:
        return planner.device_type_get(user=user(request), id=id)
    except Refusal:
        raise missing_object("device type", id, "/api/v1/device-types") from None


def get_saved_plan(request: HttpRequest, id: int) -> Any:
    """The saved plan with this id; 404 if the caller may not see it."""
    try:
        return planner.saved_plan_get(user=user(request), id=id)
    except Refusal:
        raise missing_object("saved plan", id, "/api/v1/plans") from None
