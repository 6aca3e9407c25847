"""Training that begins from existing weights: `train.init_from`, checked against the model and read
into it.

Does not know formats, or how the model is sharded.
"""

from __future__ import annotations

from typing import Any

from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.weights.open import open_source
from workers.models.weights.reader import Weights, fill_model
from workers.runtime.exits import UserError

# what may differ, because people mean it when they go on from weights: names, rates, a longer or
# shorter view
_FREE = {
    "name",
    "dropout",
    "max_seq_len",
    "window",
    "rope.theta",
    "rope.scaling",
    "moe.aux_loss",
    "moe.bias_update",
    "moe.capacity",
}


def open_initial(source: ModelSource, model: ModelSpec) -> Weights:
    """Raises UserError when the weights cannot be read, or are another model's."""
    try:
        weights = open_source(source)
    except WeightsError as error:
        raise UserError(f"train.init_from: {error}") from None
    for field, (theirs, ours) in _differences(weights.spec, model).items():
        if field not in _FREE or _must_agree(field, theirs, model):
            message = f"{weights.where} has {field} {theirs}, the model {ours}"
            raise UserError(
                f"train.init_from: {message}; try model with {field} {theirs}, or other weights"
            )
    return weights


def fill_from(parts: list[Decoder], weights: Weights) -> dict[str, Any]:
    """Read the weights into what this rank holds; returns what the event says. Raises UserError."""
    try:
        for part in parts:
            fill_model(part, weights)
    except WeightsError as error:
        raise UserError(f"train.init_from: {error}") from None
    differ = _differences(weights.spec, parts[0].spec)
    return {
        "path": weights.where,
        "weights": weights.spec.name,
        "model_differs_in": sorted(differ.keys() - {"name"}),
    }


def _differences(theirs: ModelSpec, ours: ModelSpec) -> dict[str, tuple[Any, Any]]:
    """Fields by dotted name, with both values; a part that one lacks altogether differs as a whole."""
    found: dict[str, tuple[Any, Any]] = {}
    first, second = theirs.model_dump(), ours.model_dump()
    for name in first:
        a, b = first[name], second[name]
        if isinstance(a, dict) and isinstance(b, dict):
            found |= {f"{name}.{key}": (a[key], b[key]) for key in a if a[key] != b[key]}
        elif a != b:
            found[name] = (a, b)
    return found


def _must_agree(field: str, theirs: Any, ours: ModelSpec) -> bool:
    """A table of positions has a fixed length; a router chosen by its bias goes on choosing so."""
    if field == "max_seq_len":
        return ours.position == "learned"
    return (
        field == "moe.bias_update"
        and bool(theirs)
        and ours.moe is not None
        and not ours.moe.bias_update
    )
