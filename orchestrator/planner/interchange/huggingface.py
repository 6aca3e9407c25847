"""A Hugging Face `config.json`, of transformers 4 or 5, as a ModelSpec.

Reads shapes only: knows nothing of weights, tokenizers or precision. `families` says what each
family's fields mean.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.planner.interchange.families import BEYOND, FAMILIES
from orchestrator.planner.interchange.fields import Fields, Unreadable
from workers.contracts import ModelSpec, problems_of

# the longest published config.json is well below 100 kB
_MOST_BYTES = 4 * 2**20


def read_model(source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a `config.json`, of the folder that holds one, or of its content.

    A file of ModelSpec's own fields (`layers`, `hidden`, ...) is read too. Raises Unreadable, a
    ValueError that says
    which file or field, why, and what to do next: unknown families, shapes that ModelSpec cannot
    express exactly,
    missing or wrong fields, and what is not a file or not JSON.
    """
    if isinstance(source, Mapping):
        return _model(source, "config", "")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    return _model(_read(path), str(path), path.stem if path.stem != "config" else "")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if not path.exists():
            raise Unreadable(
                f"{path} does not exist; give the path of a config.json or of the folder that "
                "holds it"
            )
        if not path.is_file():
            raise Unreadable(f"{path} is not a file; give the path of a config.json")
        if path.stat().st_size > _MOST_BYTES:
            raise Unreadable(
                f"{path} has {path.stat().st_size:,} bytes, too many for a config.json; give that "
                "one"
            )
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        why = (
            "is not UTF-8 text"
            if isinstance(error, UnicodeDecodeError)
            else f"cannot be read ({error})"
        )
        raise Unreadable(f"{path} {why}; give a config.json as transformers saves it") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Unreadable(
            f"{path} is not JSON ({error.msg} at {where}); save it again or mend that place"
        ) from None
    except (RecursionError, ValueError):
        raise Unreadable(
            f"{path} is not a config.json: nested or numbered beyond reason; give another"
        ) from None
    if not isinstance(found, dict):
        raise Unreadable(
            f"{path} holds a JSON {type(found).__name__}, not an object; give a config.json"
        )
    return found


def _model(config: Mapping[str, Any], what: str, name: str) -> ModelSpec:
    kind = config.get("model_type")
    if kind is None and {"layers", "hidden"} <= set(config):
        return _checked(dict(config), what)
    if not isinstance(kind, str):
        message = "model_type is missing" if kind is None else f"model_type is {kind!r}"
        raise Unreadable(f'{what}: {message}; add it, e.g. "model_type": "llama"')
    if kind not in FAMILIES:
        raise Unreadable(f"{what}: {_unknown(kind, config)}")
    fields = Fields(config, f"{what} ({kind})")
    if fields.flag("is_encoder_decoder", False):
        raise fields.refuse("is_encoder_decoder", "is true", "only decoders can be read")
    own = fields.word("_name_or_path", "name_or_path", default="").rstrip("/").rsplit("/", 1)[-1]
    return _checked({"name": (own or name or kind)[:120], **FAMILIES[kind](fields)}, what)


def _checked(shape: Mapping[str, Any], what: str) -> ModelSpec:
    try:
        return ModelSpec.from_dict(shape)
    except ValidationError as error:
        raise Unreadable(
            f"{what}: " + "; ".join(str(item) for item in problems_of(error))
        ) from None


def _unknown(kind: str, config: Mapping[str, Any]) -> str:
    known = ", ".join(sorted(FAMILIES))
    if kind in BEYOND:
        return (
            f"model_type {kind!r} has {BEYOND[kind]}, which ModelSpec does not express; known "
            f"are {known}"
        )
    if isinstance(config.get("text_config"), Mapping):
        return (
            f"model_type {kind!r} joins several models; save its text_config as a config.json "
            "of its own and give that"
        )
    near = difflib.get_close_matches(kind, FAMILIES, n=1, cutoff=0.6)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"model_type {kind!r} is not known; {guess}known are {known}. Or write the sizes as a "
        "ModelSpec"
    )
