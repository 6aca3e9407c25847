"""GET presets: the models, devices and data sets that a spec can name."""

from __future__ import annotations

from typing import Any, get_args

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import require_scope
from orchestrator.api.schemas.plans import PresetsOut
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.data import DataSpec

router = Router(tags=["presets"])


@router.get(
    "",
    response=PresetsOut,
    auth=require_scope("read"),
    summary="List presets",
)
def presets(request: HttpRequest) -> dict[str, Any]:
    """Model presets, catalogue devices and data presets that a spec can name."""
    return {
        "models": [
            {"name": name, "parameters": parameter_count(spec).total, "spec": spec.to_dict()}
            for name, spec in PRESETS.items()
        ],
        "devices": [device.to_dict() for device in DEVICES.values()],
        "data": data_presets(),
    }


def data_presets() -> list[str]:
    """The values that `data.preset` accepts."""
    literal = next(
        kind
        for kind in get_args(DataSpec.model_fields["preset"].annotation)
        if kind is not type(None)
    )
    return [str(name) for name in get_args(literal)]
