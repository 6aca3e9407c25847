"""The planner's functions for a logged-in user, with their own devices and stored calibrations.

Reads the database and writes nothing; `api` does the computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.accounts.models import User
from orchestrator.planner import api
from orchestrator.planner.explain import parse_explain_options
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.plan_request import BadRequest, ParsedLine, ParseOptions
from orchestrator.planner.search.search_request import MAX_EXPLAINED
from orchestrator.planner.store import node_probes, selectors
from orchestrator.planner.store.node_probes import ProbedDevice
from workers.contracts.base import problem
from workers.contracts.catalog.devices import DEVICES

_NO_CALIBRATION = "none"


def estimate(
    *,
    user: User,
    lines: Sequence[Any],
    calibration: int | str | None = None,
    explain: Any = False,
    explain_depth: int | None = None,
    strict: bool = False,
) -> list[dict[str, Any]]:
    """One answer per line, in their order, each with the name of its `calibration` or None.

    `calibration` is a stored one's number or name, "none", or None for each device's default.
    `explain` is true or names numbers. Raises BadRequest if there are too many lines to explain,
    and with `strict` for a line that cannot be read; illegal plans are answered in any case.
    """
    explain_options = parse_explain_options(explain, explain_depth)
    if explain_options and len(lines) > MAX_EXPLAINED:
        message = (
            f"{len(lines)} lines are too many to explain at once, the limit is {MAX_EXPLAINED}"
        )
        raise BadRequest([problem("explain", message, "Use fewer lines, or omit explain.")])
    options = parse_options_for(user)
    answers: list[dict[str, Any]] = [{}] * len(lines)
    groups: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        groups.setdefault(_device_name(line), []).append(index)
    for device, indices in groups.items():
        name, fitted = calibration_for(user=user, device=device, named=calibration)
        parsed = [api.parse_line(lines[index], options, fitted) for index in indices]
        if strict:
            _require_readable(parsed)
        group_answers = api.estimate(parsed, calibration=fitted, explain=explain_options)
        for index, answer in zip(indices, group_answers, strict=True):
            answers[index] = {**answer, "calibration": name}
    return answers


def search(
    *,
    user: User,
    request: Mapping[str, Any],
    calibration: int | str | None = None,
    explain: Any = False,
    explain_depth: int | None = None,
) -> dict[str, Any]:
    """The search answer with the name of its `calibration`. Raises BadRequest."""
    name, fitted = calibration_for(user=user, device=_device_name(request), named=calibration)
    answer = api.search(
        request,
        calibration=fitted,
        explain=parse_explain_options(explain, explain_depth),
        options=parse_options_for(user),
    )
    return {**answer, "calibration": name}


def export(*, user: User, line: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """`{engine, filename, text, notes}`: the line's plan as that engine's configuration.

    Raises BadRequest.
    """
    exported = api.export(line, engine, options=parse_options_for(user))
    return {
        "engine": engine,
        "filename": exported.filename,
        "text": exported.text,
        "notes": list(exported.notes),
    }


def serving(*, user: User, request: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted memory, latency and throughput of serving a model. Raises BadRequest."""
    explain = bool(request.get("explain"))
    values = {key: value for key, value in request.items() if key != "explain"}
    return api.serving(values, explain=explain, options=parse_options_for(user))


def simulate_serving(*, user: User, request: Mapping[str, Any]) -> dict[str, Any]:
    """Simulated latency and throughput of serving under a load. Raises BadRequest."""
    return api.simulate_serving(request, options=parse_options_for(user))


def parse_options_for(user: User) -> ParseOptions:
    """Options that let request lines name the user's own devices.

    `cpu` has the rates of the probe whose calibration predictions use, if there is one.
    """
    own = selectors.own_devices(user=user)
    if "cpu" not in own and node_probes.usable_default(device="cpu")[0] is None:
        probed = _probed("cpu")
        own |= {} if probed is None else {"cpu": probed.entry}
    return ParseOptions(own)


def calibration_for(
    *, user: User, device: str, named: int | str | None = None
) -> tuple[str | None, Calibration | None]:
    """`(name, calibration)` for a device: the named one, else the device's default.

    Raises 404 for an unknown name.
    """
    if named == _NO_CALIBRATION:
        return None, None
    if named is None or named == "":
        fitted, name, _ = node_probes.usable_default(device=device)
        if fitted is None and (probed := _probed(device)) is not None:
            return probed.name, probed.calibration
        return name, fitted
    row = selectors.calibration_get(user=user, id=named)
    try:
        return row.name, Calibration.from_dict(row.document)
    except ValueError as error:
        raise BadRequest(
            [problem("calibration", f"{row.name} is {error}", _NO_CALIBRATION)]
        ) from None


def _probed(device: str) -> ProbedDevice | None:
    """The probe of a node with this device, if it fitted parameters."""
    probed = node_probes.probed_device(catalogue=device) if device in DEVICES else None
    return probed if probed is not None and probed.calibration is not None else None


def _device_name(line: Any) -> str:
    cluster = line.get("cluster") if isinstance(line, Mapping) else None
    device = cluster.get("device") if isinstance(cluster, Mapping) else None
    if isinstance(device, Mapping):
        device = device.get("name")
    return device if isinstance(device, str) else "cpu"


def _require_readable(lines: Sequence[ParsedLine]) -> None:
    for line in lines:
        if line.request is None and not line.illegal:
            raise BadRequest(
                line.problems or [problem("", "the request is empty", "Use a request line.")]
            )
