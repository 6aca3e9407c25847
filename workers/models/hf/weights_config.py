"""The configuration of a Hugging Face folder, read for loading its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.contracts.huggingface import UnreadableConfig, read_config, read_json_object
from workers.contracts.huggingface.config_reader import MAX_CONFIG_BYTES
from workers.contracts.specs.model import ModelSpec
from workers.models.errors import WeightsError


def read_shape(config: Mapping[str, Any], *, label: str, name: str) -> tuple[str, ModelSpec]:
    """The family (`model_type`) and the shape.

    Raises WeightsError if the family's weights cannot be loaded, or if a field would change a logit
    and ModelSpec cannot express it.
    """
    try:
        return read_config(config, label=label, name=name, for_weights=True)
    except UnreadableConfig as error:
        raise WeightsError(str(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an index of tensors may have any size. Raises WeightsError."""
    limit = None if path.name.endswith(".index.json") else MAX_CONFIG_BYTES
    try:
        return read_json_object(path, max_bytes=limit)
    except UnreadableConfig as error:
        raise WeightsError(str(error)) from None
