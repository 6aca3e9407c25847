"""The lines that a generate run answers: read from JSONL, each checked, and turned into token ids.

Knows the format `{id, prompt | messages | token_ids}`; a line may besides name any parameter of `SamplingParams` that it
wants otherwise than the run. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from workers.inference.sampling.parameters import SamplingParams
from workers.inference.text.tokenizer import Tokenizer
from workers.models.errors import WeightsError
from workers.runtime.exits import UserError

_FORMS = ("prompt", "messages", "token_ids")
_OWN = {each.name for each in fields(SamplingParams)} - {"stop_token_ids"}


@dataclass(frozen=True, slots=True)
class Line:
    """Line `number` of the file, from 1; `form` says what `given` is."""

    number: int
    id: Any
    form: str
    given: Any
    own: Mapping[str, Any]

    def tokens(self, words: Tokenizer | None) -> list[int]:
        """Raises ValueError where it cannot be read as text."""
        if self.form == "token_ids":
            return list(self.given)
        if words is None:
            raise ValueError(
                f"{self.form} is text, and the model came without a tokenizer; give token_ids"
            )
        if self.form == "prompt":
            return words.encode(self.given)
        try:
            return words.encode(words.chat(self.given), special=False)
        except WeightsError as error:
            raise ValueError(str(error)) from None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The run's parameters with the line's own. Raises ValueError."""
        own = dict(self.own)
        if isinstance(own.get("stop"), list | str):
            own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"])
        return replace(defaults, **own)


def read_lines(path: Path) -> list[Line]:
    """All of them; empty ones are passed over. Raises UserError naming the first that is wrong."""
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(
            f"generate.input: {path} cannot be read: {error.strerror}; give an existing file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"generate.input: {path} is no UTF-8 at byte {error.start}; write it as UTF-8"
        ) from None
    found = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                found.append(_line(number, text))
            except ValueError as error:
                raise UserError(f"generate.input: {path} line {number}: {error}") from None
    return found


def _line(number: int, text: str) -> Line:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('it is no JSON object; write {"id": 1, "prompt": "…"}')
    forms = [form for form in _FORMS if given.get(form) is not None]
    if "id" not in given or len(forms) != 1:
        message = (
            "it has no id"
            if "id" not in given
            else f"it has {' and '.join(forms) or 'nothing to answer'}"
        )
        raise ValueError(f"{message}; a line wants an id and one of prompt, messages and token_ids")
    form = forms[0]
    if unknown := sorted(given.keys() - _OWN - {"id", *_FORMS}):
        raise ValueError(
            f"{unknown[0]!r} is no field of a line; beside id and {form} there may be "
            f"{sorted(_OWN)}"
        )
    if not GOOD[form](given[form]):
        raise ValueError(f"{form} must be {_WANTS[form]}")
    own = {name: value for name, value in given.items() if name in _OWN and value is not None}
    line = Line(number, given["id"], form, given[form], own)
    line.sampling(SamplingParams())  # so that a wrong parameter is told before anything is generated
    return line


def _are_messages(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each
            for each in given
        )
    )


GOOD: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda given: isinstance(given, str),
    "messages": _are_messages,
    "token_ids": lambda given: isinstance(given, list) and all(type(each) is int for each in given),
}
_WANTS = {
    "prompt": "a text",
    "messages": "a list of {role, content}",
    "token_ids": "a list of whole numbers",
}
