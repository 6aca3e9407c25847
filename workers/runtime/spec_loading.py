"""Reads a RunSpec file; a wrong one is a UserError with one line per problem.

Pydantic and the standard library only, so a wrong spec fails in a fraction of a second.
Does not depend on an engine: each engine checks which specs it can run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import Problem, validation_problems
from workers.contracts.specs.run import RunSpec
from workers.runtime.exit_codes import UserError


def read_document(path: Path, kind: str) -> dict[str, Any]:
    """The JSON object of a spec file; `kind` is the example in an error. Raises UserError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"spec {path} cannot be read: {error.strerror}. Use --spec with an existing file."
        ) from None
    except ValueError as error:
        raise UserError(f"spec {path} is not JSON: {error}. Correct the JSON.") from None
    if not isinstance(document, dict):
        raise UserError(f'spec {path} is not a JSON object. Use {{"kind": "{kind}", ...}}.')
    return document


def parse_spec(document: Mapping[str, Any]) -> RunSpec:
    """Validate a document. Raises UserError with one line per wrong field."""
    try:
        return RunSpec.from_dict(document)
    except ValidationError as error:
        raise _spec_error(validation_problems(error)) from None


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise UserError with one line per problem, if there are any."""
    if problems:
        raise _spec_error(problems)


def _spec_error(problems: Sequence[Problem]) -> UserError:
    return UserError("\n".join(str(problem) for problem in problems))
