"""Stored calibrations, own devices and saved plans: permissions and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.planner import user_api
from orchestrator.planner.models import Calibration
from orchestrator.planner.store import selectors, services
from tests.orchestrator.planner.test_request_parsing import H100, LINE

MEASURED = [
    {
        **LINE,
        "id": seq_len,
        "workload": {"seq_len": seq_len},
        "measured": {"step_time_s": seq_len / 2000},
    }
    for seq_len in (2048, 4096, 8192)
]
OWN: dict[str, Any] = {**H100, "name": "lab-gpu", "memory_bytes": 40 * 2**30}


def refused(status: int, act: Any, **arguments: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        act(**arguments)
    assert caught.value.status == status, caught.value.detail
    return caught.value


def test_a_calibration_is_fitted_stored_and_extended(
    owner: User, teammate: User, stranger: User
) -> None:
    made = services.calibration_add(
        by=owner, name=" March ", measurements=MEASURED[:2], default=True
    )
    assert (made.name, made.device, made.framework, made.rows, made.default) == (
        "March",
        "h100-80g",
        "fsdp2",
        2,
        True,
    )
    again = services.calibration_add(by=owner, name="", measurements=MEASURED[1:], onto=made)
    assert (again.pk, again.rows, again.version) == (made.pk, 3, made.version + 1)
    refused(409, services.calibration_add, by=owner, name="x", measurements=MEASURED, onto=made)
    refused(409, services.calibration_add, by=owner, name="March", measurements=MEASURED)
    refused(403, services.calibration_add, by=teammate, name="", measurements=MEASURED, onto=again)
    refused(403, services.calibration_add, by=stranger, name="x", measurements=MEASURED)
    unnamed = [services.calibration_add(by=owner, name="", measurements=MEASURED) for _ in range(2)]
    assert unnamed[1].name == f"{unnamed[0].name} (2)" and unnamed[0].name.startswith("h100-80g, ")
    for each in unnamed:
        services.calibration_delete(calibration=each, by=owner)
    other = services.calibration_add(by=teammate, name="April", measurements=MEASURED, default=True)
    assert selectors.calibration_default(device="h100-80g") == other
    assert [each.name for each in selectors.calibrations_visible_to(user=stranger)] == [
        "April",
        "March",
    ]
    refused(403, services.calibration_delete, calibration=other, by=owner)
    services.calibration_delete(calibration=other, by=teammate)
    assert selectors.calibration_default(device="h100-80g") is None


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({**MEASURED[0], "measured": {}}, "measurements.0.measured"),
        ({**MEASURED[0], "model": "x"}, "measurements.0.model"),
        ({**MEASURED[0], "plan": {"dp": 3}}, "measurements.0.plan.dp"),
    ],
)
def test_unusable_lines_are_named(owner: User, line: dict[str, Any], field: str) -> None:
    refusal = refused(422, services.calibration_add, by=owner, name="x", measurements=[line])
    assert (
        field in [error["field"] for error in refusal.errors] and not Calibration.objects.exists()
    )
    refused(422, services.calibration_add, by=owner, name="x", measurements=[])


def test_own_devices_are_visible_to_the_team(owner: User, teammate: User, stranger: User) -> None:
    made = services.device_type_create(by=owner, entry=OWN)
    assert selectors.own_devices(user=teammate)["lab-gpu"].memory_bytes == 40 * 2**30
    assert not selectors.own_devices(user=stranger)
    line = {**LINE, "cluster": {"device": "lab-gpu", "devices_per_node": 8}}
    [answer] = user_api.estimate(user=teammate, lines=[line])
    assert answer["memory"]["capacity_bytes"] == 40 * 2**30
    refused(409, services.device_type_create, by=owner, entry=OWN)
    refused(422, services.device_type_create, by=owner, entry=H100)
    refused(
        422,
        services.device_type_create,
        by=owner,
        entry={**OWN, "name": "y", "peak_tflops": {"int4": 3}},
    )
    refused(422, services.device_type_create, by=owner, entry={"name": "z"})
    refused(403, services.device_type_delete, device_type=made, by=teammate)
    services.device_type_delete(device_type=made, by=owner)


def test_estimates_use_the_devices_default_calibration(owner: User) -> None:
    [before] = user_api.estimate(user=owner, lines=[LINE])
    services.calibration_add(by=owner, name="March", measurements=MEASURED, default=True)
    [after] = user_api.estimate(user=owner, lines=[LINE])
    [without] = user_api.estimate(user=owner, lines=[LINE], calibration="none")
    assert (before["calibration"], after["calibration"], without["calibration"]) == (
        None,
        "March",
        None,
    )
    assert without["step_time_s"] == before["step_time_s"] != after["step_time_s"]
    refused(404, user_api.estimate, user=owner, lines=[LINE], calibration="May")


def test_saved_plans_can_be_estimated(owner: User, teammate: User, stranger: User) -> None:
    made = services.plan_save(by=owner, name="the one", line=LINE, link="/planner/?m=x")
    assert selectors.saved_plan_get(user=teammate, id=made.pk).line == LINE
    refused(404, selectors.saved_plan_get, user=stranger, id=made.pk)
    refused(422, services.plan_save, by=owner, name="x", line={**LINE, "plan": {"dp": 3}})
    refused(403, services.plan_delete, plan=made, by=teammate)
