"""The planner's doors for people who are logged in: their own devices and the stored calibrations
come along.

Reads the database, writes nothing; what is computed, `ask` computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.accounts.models import User
from orchestrator.planner import api
from orchestrator.planner.calibration.result import Calibration
from orchestrator.planner.requests import Asked, BadRequest, Choices
from orchestrator.planner.store import selectors
from workers.contracts.base import problem

NONE = "none"


def estimate(
    *,
    user: User,
    lines: Sequence[Any],
    calibration: int | str | None = None,
    explain: Any = False,
    explain_depth: int | None = None,
    strict: bool = False,
) -> list[dict[str, Any]]:
    """Answer lines in the order of the lines, each with the name of the `calibration` it rests on,
    or None.

    `calibration` is a stored one's number or name, "none", or None: each device kind's default one.
    With `strict` a
    line that cannot even be read raises BadRequest; illegal plans are answered in any case. So do
    too many lines at
    once to `explain`, which is true, or names numbers.
    """
    wanted = api.trees(explain, explain_depth)
    if wanted and len(lines) > api.MOST_EXPLAINED:
        message = (
            f"{len(lines)} lines are too many to explain at once, at most {api.MOST_EXPLAINED} are"
        )
        raise BadRequest([problem("explain", message, "fewer lines, or no explain")])
    choices = choices_of(user)
    found: list[dict[str, Any]] = [{}] * len(lines)
    groups: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        groups.setdefault(_device(line), []).append(place)
    for device, places in groups.items():
        name, used = calibration_for(user=user, device=device, named=calibration)
        asked = [api.read_one(lines[place], choices, used) for place in places]
        if strict:
            _readable(asked)
        told = api.of_asked(asked, calibration=used, explain=wanted)
        for place, answer in zip(places, told, strict=True):
            found[place] = {**answer, "calibration": name}
    return found


def search(
    *,
    user: User,
    request: Mapping[str, Any],
    calibration: int | str | None = None,
    explain: Any = False,
    explain_depth: int | None = None,
) -> dict[str, Any]:
    """The search answer with the name of the `calibration` it rests on. Raises BadRequest."""
    name, used = calibration_for(user=user, device=_device(request), named=calibration)
    wanted = api.trees(explain, explain_depth)
    told = api.search(request, calibration=used, explain=wanted, choices=choices_of(user))
    return {**told, "calibration": name}


def export(*, user: User, line: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """`{engine, filename, text, notes}`: the line's plan as that engine's configuration.

    Raises BadRequest.
    """
    made = api.export(line, engine, choices=choices_of(user))
    return {
        "engine": engine,
        "filename": made.filename,
        "text": made.text,
        "notes": list(made.notes),
    }


def serving(*, user: User, request: Mapping[str, Any]) -> dict[str, Any]:
    """What serving a model would reach. Raises BadRequest."""
    explain = bool(request.get("explain"))
    given = {key: value for key, value in request.items() if key != "explain"}
    return api.serving(given, explain=explain, choices=choices_of(user))


def choices_of(user: User) -> Choices:
    return Choices(selectors.own_devices(user=user))


def calibration_for(
    *, user: User, device: str, named: int | str | None = None
) -> tuple[str | None, Calibration | None]:
    """`(its name, the calibration)` for a kind of device; the default one unless one is named.

    Raises 404.
    """
    if named == NONE:
        return None, None
    if named is None or named == "":
        row = selectors.calibration_default(device=device)
    else:
        row = selectors.calibration_get(user=user, id=named)
    return (row.name, Calibration.from_dict(row.document)) if row is not None else (None, None)


def _device(line: Any) -> str:
    cluster = line.get("cluster") if isinstance(line, Mapping) else None
    device = cluster.get("device") if isinstance(cluster, Mapping) else None
    if isinstance(device, Mapping):
        device = device.get("name")
    return device if isinstance(device, str) else "cpu"


def _readable(asked: Sequence[Asked]) -> None:
    for each in asked:
        if each.request is None and not each.illegal:
            raise BadRequest(
                each.problems or [problem("", "there is nothing to estimate", "a request line")]
            )
