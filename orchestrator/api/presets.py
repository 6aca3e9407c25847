"""What a spec may name: model presets, catalogued devices, data presets.

Plain tables of the contracts.
"""

from __future__ import annotations

from typing import Any, get_args

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import needs
from orchestrator.api.schemas import PresetsOut
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.data import DataSpec

router = Router(tags=["presets"])


@router.get(
    "",
    response=PresetsOut,
    auth=needs("read"),
    summary="Models, devices and data that a spec may name",
)
def presets(request: HttpRequest) -> dict[str, Any]:
    return {
        "models": [
            {"name": name, "parameters": parameter_count(spec).total, "spec": spec.to_dict()}
            for name, spec in PRESETS.items()
        ],
        "devices": [device.to_dict() for device in DEVICES.values()],
        "data": data_presets(),
    }


def data_presets() -> list[str]:
    """The names that `data.preset` takes."""
    literal = next(
        kind
        for kind in get_args(DataSpec.model_fields["preset"].annotation)
        if kind is not type(None)
    )
    return [str(name) for name in get_args(literal)]
