"""Loads existing weights for `train.init_from`, after comparing their model with the run's.

Does not depend on file formats or on sharding.
"""

from __future__ import annotations

from typing import Any

from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.weights.open import open_source
from workers.models.weights.reader import Weights, fill_model
from workers.runtime.exit_codes import UserError

# fields that may differ, because users change them on purpose: name, rates, context length
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


def open_initial(
    source: ModelSource, model: ModelSpec, *, field: str = "train.init_from"
) -> Weights:
    """Raises UserError, which names `field`, if the weights cannot be read or belong to another
    model.
    """
    try:
        weights = open_source(source)
    except WeightsError as error:
        raise UserError(f"{field}: {error}") from None
    # a new reward model replaces the head
    replaced = {"tie_embeddings", "logit_softcap"} if model.scalar_head else set()
    for name, (theirs, ours) in _differences(weights.spec, model).items():
        if name in replaced or (name == "scalar_head" and model.scalar_head):
            continue
        if name not in _FREE or _must_agree(name, theirs, model):
            message = f"{weights.where} has {name} {theirs}, the model {ours}"
            raise UserError(
                f"{field}: {message}. Use model with {name} {theirs}, or other weights."
            )
    return weights


def fill_from(
    parts: list[Decoder], weights: Weights, *, field: str = "train.init_from"
) -> dict[str, Any]:
    """Load the weights into this rank's parts; returns the event's data. Raises UserError."""
    try:
        for part in parts:
            fill_model(part, weights)
    except WeightsError as error:
        raise UserError(f"{field}: {error}") from None
    differ = _differences(weights.spec, parts[0].spec)
    return {
        "path": weights.where,
        "weights": weights.spec.name,
        "model_differs_in": sorted(differ.keys() - {"name"}),
    }


def _differences(theirs: ModelSpec, ours: ModelSpec) -> dict[str, tuple[Any, Any]]:
    """Both values by dotted field name; a group that one side lacks differs as one field."""
    differences: dict[str, tuple[Any, Any]] = {}
    first, second = theirs.model_dump(), ours.model_dump()
    for name in first:
        a, b = first[name], second[name]
        if isinstance(a, dict) and isinstance(b, dict):
            differences |= {f"{name}.{key}": (a[key], b[key]) for key in a if a[key] != b[key]}
        elif a != b:
            differences[name] = (a, b)
    return differences


def _must_agree(field: str, theirs: Any, ours: ModelSpec) -> bool:
    """A table of positions has a fixed length; a router with bias updates needs them."""
    if field == "max_seq_len":
        return ours.position == "learned"
    return (
        field == "moe.bias_update"
        and bool(theirs)
        and ours.moe is not None
        and not ours.moe.bias_update
    )
