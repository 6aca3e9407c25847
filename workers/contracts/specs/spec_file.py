"""A run's spec out of a file, or refused by sentences.

Which runs an engine can do, it knows by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import Problem, problems_of
from workers.contracts.specs.run import RunSpec
from workers.contracts.wire.exits import UserError


def read_document(path: Path, kind: str) -> dict[str, Any]:
    """A spec file's JSON object; `kind` is the example an error names. Raises UserError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"spec {path} cannot be read: {error.strerror}; try --spec with an existing file"
        ) from None
    except ValueError as error:
        raise UserError(f"spec {path} is not JSON: {error}; try a JSON checker") from None
    if not isinstance(document, dict):
        raise UserError(f'spec {path} is not a JSON object; try {{"kind": "{kind}", ...}}')
    return document


def read_spec(document: Mapping[str, Any]) -> RunSpec:
    """Raises UserError with one line for each field that is wrong."""
    try:
        return RunSpec.from_dict(document)
    except ValidationError as error:
        raise refused(problems_of(error)) from None


def refused(found: Sequence[Problem]) -> UserError:
    """One line a problem."""
    return UserError("\n".join(str(item) for item in found))
