"""What the planner's page asks of the planner: a search, single plans, all terms of one plan.
Remembers the newest.

Knows the question of the page and the planner's doors; knows no markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from orchestrator.planner import api, user_api
from orchestrator.planner.answers import build_table
from orchestrator.planner.calibration.result import Calibration
from orchestrator.planner.plan_request import BadRequest, ParseOptions
from webui.planner.form import Question
from workers.contracts.catalog.devices import DEVICES, Device

_KEPT: Final = 64  # answers in memory; one of 100 plans is about 200 kB
# what a search keeps to while a slider is held: a thirtieth of the plans, most often with the best
# of all among them
_QUICK: Final[dict[str, Any]] = {
    "prefetch_layers": [None],
    "dp_replicate": [None],
    "offload": ["none", "optimizer"],
    "schedule": ["1f1b", "zbv"],
    "micro_batch_size": [1, 2, 3, 4, 5, 6, 8, 16],
}


@dataclass(frozen=True)
class Asker:
    """A person's question with what its answer rests on: their own devices and the device's
    calibration, as JSON.
    """

    question: Question
    devices: str
    calibration: str  # empty: the catalogue's figures
    calibration_name: str = ""
    quick: bool = False

    def search(self) -> dict[str, Any]:
        """The search's answer, plans in the objective's order; `{problems}` alone where it cannot
        be asked.
        """
        found = self._search(self._few()) if self.quick else {}
        return found if found.get("fit") else self._search({})

    def _few(self) -> dict[str, Any]:
        name = self.question.values["device"]
        on_cpu = (
            name == "cpu" or _devices(self.devices).get(name, DEVICES["h100-80g"]).kind == "cpu"
        )
        return {key: value for key, value in _QUICK.items() if not (on_cpu and key == "offload")}

    def _search(self, fix: Mapping[str, Any]) -> dict[str, Any]:
        asked = self.question
        fix = {**fix, **asked.fixed()}
        request = {
            **asked.line(),
            "fix": fix,
            "objective": asked.objective,
            "top": min(200, 3 * asked.top),
        }
        return _searched(json.dumps(request, sort_keys=True), self.devices, self.calibration)

    def estimate(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """One plan's answer line with its `plan`; `{ok: false, problems}` where it is not legal."""
        found = _estimated(
            json.dumps(self.question.line(plan), sort_keys=True), self.devices, self.calibration
        )
        return {**found, "plan": dict(plan)} if found.get("ok") else found

    def table(self, plan: Mapping[str, Any]) -> Any:
        """All terms of one plan, for the trees under its numbers; None where it is not legal."""
        asked = api.parse_line(self.question.line(plan), ParseOptions(_devices(self.devices)), None)
        return (
            None
            if asked.request is None
            else build_table([asked.request], _calibration(self.calibration))
        )


def asker(question: Question, user: Any, *, quick: bool = False) -> Asker:
    name, calibration = user_api.calibration_for(user=user, device=question.values["device"])
    own = {
        key: device.to_dict() for key, device in user_api.parse_options_for(user).devices.items()
    }
    document = json.dumps(calibration.to_dict(), sort_keys=True) if calibration else ""
    return Asker(question, json.dumps(own, sort_keys=True), document, name or "", quick)


@lru_cache(maxsize=_KEPT)
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


@lru_cache(maxsize=4 * _KEPT)
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
