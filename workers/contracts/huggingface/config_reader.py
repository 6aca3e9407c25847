"""A Hugging Face `config.json`, of transformers 4 or 5, as a ModelSpec.

Does not depend on weights, tokenizers or precision; `families` maps each family's fields.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import validation_problems
from workers.contracts.huggingface.families import FAMILIES, UNSUPPORTED, WEIGHT_FAMILIES
from workers.contracts.huggingface.fields import ConfigFields, UnreadableConfig
from workers.contracts.specs.model import ModelSpec

# how `architectures` of a reward model ends
CLASSIFIER = "ForSequenceClassification"
# the longest published config.json is below 100 kB
MAX_CONFIG_BYTES = 4 * 2**20


def read_model(source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a `config.json`, of the folder that contains one, or of its content.

    A file with ModelSpec's own fields (`layers`, `hidden`, ...) is read too. Raises
    UnreadableConfig for unknown families, shapes that ModelSpec cannot express exactly, missing or
    wrong fields, and for what is not a file or not JSON.
    """
    if isinstance(source, Mapping):
        return _read(source, "config", "")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    return _read(read_json_object(path), str(path), path.stem if path.stem != "config" else "")


def read_config(
    config: Mapping[str, Any], *, label: str, name: str, for_weights: bool = False
) -> tuple[str, ModelSpec]:
    """The family (`model_type`) and the shape of a configuration's content.

    `name` is the model's name if the configuration has none. With `for_weights` only families
    whose weights can be loaded are accepted, and fields that would change a logit are checked too.
    Raises UnreadableConfig.
    """
    family = config.get("model_type")
    if not isinstance(family, str):
        message = "model_type is missing" if family is None else f"model_type is {family!r}"
        raise UnreadableConfig(f"{label}: {message}", 'Add it, for example "model_type": "llama".')
    known = sorted(WEIGHT_FAMILIES if for_weights else FAMILIES)
    if family not in known:
        message, hint = _unknown_family(family, config, known)
        raise UnreadableConfig(f"{label}: {message}", hint)
    fields = ConfigFields(config, f"{label} ({family})", for_weights=for_weights)
    if fields.flag("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "is true", "Use a decoder.")
    path = fields.text("_name_or_path", "name_or_path", default="")
    own_name = path.rstrip("/").rsplit("/", 1)[-1]
    shape = {"name": (own_name or name or family)[:120], **FAMILIES[family](fields)}
    return family, _validated({**shape, **_head(config, fields)}, label)


def _head(config: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """The fields of a sequence classifier's head. Raises UnreadableConfig for several labels."""
    listed = config.get("architectures")
    names = listed if isinstance(listed, list) else []
    if not any(isinstance(each, str) and each.endswith(CLASSIFIER) for each in names):
        return {}
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if count != 1:
        raise fields.error("num_labels", f"is {count}", "Use a reward model, which has 1.")
    return {"scalar_head": True, "tie_embeddings": False}


def read_json_object(path: Path, *, max_bytes: int | None = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`. Raises UnreadableConfig."""
    try:
        if not path.exists():
            raise UnreadableConfig(
                f"{path} does not exist",
                "Use a folder as transformers saves it, or its config.json.",
            )
        if not path.is_file():
            raise UnreadableConfig(f"{path} is not a file", "Use the path of a config.json.")
        size = path.stat().st_size
        if max_bytes is not None and size > max_bytes:
            raise UnreadableConfig(
                f"{path} has {size:,} bytes, too many for a configuration", "Use a config.json."
            )
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnreadableConfig):
            raise
        why = (
            "is not UTF-8 text"
            if isinstance(error, UnicodeDecodeError)
            else f"cannot be read ({error})"
        )
        raise UnreadableConfig(f"{path} {why}", "Use a file as transformers saves it.") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UnreadableConfig(
            f"{path} is not JSON ({error.msg} at {where})", "Correct that place, or save it again."
        ) from None
    except (RecursionError, ValueError):
        raise UnreadableConfig(
            f"{path} is not a configuration: its nesting or a number is too large",
            "Use another file.",
        ) from None
    if not isinstance(value, dict):
        raise UnreadableConfig(
            f"{path} contains a JSON {type(value).__name__}, not an object",
            "Use a file as transformers saves it.",
        )
    return value


def _read(config: Mapping[str, Any], label: str, name: str) -> ModelSpec:
    if config.get("model_type") is None and {"layers", "hidden"} <= set(config):
        return _validated(config, label)
    return read_config(config, label=label, name=name)[1]


def _validated(shape: Mapping[str, Any], label: str) -> ModelSpec:
    try:
        return ModelSpec.from_dict(shape)
    except ValidationError as error:
        problems = "; ".join(str(problem) for problem in validation_problems(error))
        raise UnreadableConfig(f"{label}: {problems}") from None


def _unknown_family(family: str, config: Mapping[str, Any], known: list[str]) -> tuple[str, str]:
    """`(message, hint)` for a model_type that cannot be read."""
    use = f"Use one of {', '.join(known)}."
    if family in UNSUPPORTED:
        reason = f"has {UNSUPPORTED[family]}, which ModelSpec does not express"
        return f"model_type {family!r} {reason}", use
    if family in FAMILIES:
        return f"weights of model_type {family!r} cannot be loaded", use
    if isinstance(config.get("text_config"), Mapping):
        return (
            f"model_type {family!r} joins several models",
            "Save its text_config as a config.json of its own, and use that.",
        )
    near = difflib.get_close_matches(family, known, n=1, cutoff=0.6)
    use = f"Use {near[0]!r} if you meant that." if near else use
    return f"model_type {family!r} is not known", f"{use} Or write the sizes as a ModelSpec."
