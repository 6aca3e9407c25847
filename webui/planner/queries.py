"""Cached planner calls of the planner page: search, estimate and term table.

Does not depend on templates or requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from orchestrator.planner import api, user_api
from orchestrator.planner.answers import build_table
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.plan_request import BadRequest, ParseOptions
from webui.planner.form import FormState
from workers.contracts.catalog.devices import DEVICES, Device

_CACHE_SIZE: Final = 64  # cached answers; 100 plans take about 200 kB
# limits of a search while a slider is dragged: 1/30 of the plans, most often including the best
_QUICK_LIMITS: Final[dict[str, Any]] = {
    "prefetch_layers": [None],
    "dp_replicate": [None],
    "offload": ["none", "optimizer"],
    "schedule": ["1f1b", "zbv"],
    "micro_batch_size": [1, 2, 3, 4, 5, 6, 8, 16],
}


@dataclass(frozen=True)
class PlannerClient:
    """Planner calls for a form state, with the user's devices and calibration as JSON."""

    state: FormState
    devices: str
    calibration: str  # empty: catalog values
    calibration_name: str = ""
    quick: bool = False

    def search(self) -> dict[str, Any]:
        """Returns the search answer, best plan first; `{problems}` if the request is invalid."""
        answer = self._search(self._quick_limits()) if self.quick else {}
        return answer if answer.get("fit") else self._search({})

    def _quick_limits(self) -> dict[str, Any]:
        name = self.state.values["device"]
        on_cpu = (
            name == "cpu" or _devices(self.devices).get(name, DEVICES["h100-80g"]).kind == "cpu"
        )
        return {
            key: value for key, value in _QUICK_LIMITS.items() if not (on_cpu and key == "offload")
        }

    def _search(self, fix: Mapping[str, Any]) -> dict[str, Any]:
        state = self.state
        fix = {**fix, **state.fixed()}
        request = {
            **state.line(),
            "fix": fix,
            "objective": state.objective,
            "top": min(200, 3 * state.top),
        }
        return _searched(json.dumps(request, sort_keys=True), self.devices, self.calibration)

    def estimate(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer of one plan; `{ok: false, problems}` if it is not valid."""
        answer = _estimated(
            json.dumps(self.state.line(plan), sort_keys=True), self.devices, self.calibration
        )
        return {**answer, "plan": dict(plan)} if answer.get("ok") else answer

    def table(self, plan: Mapping[str, Any]) -> Any:
        """Returns all terms of one plan; None if it is not valid."""
        state = api.parse_line(self.state.line(plan), ParseOptions(_devices(self.devices)), None)
        return (
            None
            if state.request is None
            else build_table([state.request], _calibration(self.calibration))
        )


def planner_client(state: FormState, user: Any, *, quick: bool = False) -> PlannerClient:
    """Returns the planner calls for this form state and user."""
    name, calibration = user_api.calibration_for(user=user, device=state.values["device"])
    own = {
        key: device.to_dict() for key, device in user_api.parse_options_for(user).devices.items()
    }
    document = json.dumps(calibration.to_dict(), sort_keys=True) if calibration else ""
    return PlannerClient(state, json.dumps(own, sort_keys=True), document, name or "", quick)


@lru_cache(maxsize=_CACHE_SIZE)
def _searched(text: str, devices: str, calibration: str) -> dict[str, Any]:
    try:
        return api.search(
            json.loads(text),
            calibration=_calibration(calibration),
            options=ParseOptions(_devices(devices)),
            front=True,
        )
    except BadRequest as refused:
        return {"problems": [item.model_dump(by_alias=True) for item in refused.problems]}


@lru_cache(maxsize=4 * _CACHE_SIZE)
def _estimated(text: str, devices: str, calibration: str) -> dict[str, Any]:
    return api.estimate(
        [json.loads(text)],
        calibration=_calibration(calibration),
        options=ParseOptions(_devices(devices)),
    )[0]


@lru_cache(maxsize=8)
def _calibration(document: str) -> Calibration | None:
    return Calibration.from_dict(json.loads(document)) if document else None


@lru_cache(maxsize=8)
def _devices(text: str) -> dict[str, Device]:
    return {name: Device.from_dict(entry) for name, entry in json.loads(text).items()}
