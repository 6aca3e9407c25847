"""Input lines of a generate run: read from JSONL, checked, and converted to token ids.

Format: `{id, prompt | messages | token_ids}` and any parameter of `SamplingParams` that overrides
the run's. Loads no torch.
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
from workers.runtime.exit_codes import UserError

_FORMS = ("prompt", "messages", "token_ids")
_OVERRIDES = {field.name for field in fields(SamplingParams)} - {
    "stop_token_ids",
    "prompt_logprobs",
}


@dataclass(frozen=True, slots=True)
class PromptLine:
    """Line `number` of the file, from 1; `form` is the key of `value`."""

    number: int
    id: Any
    form: str
    value: Any
    overrides: Mapping[str, Any]

    def tokens(self, tokenizer: Tokenizer | None) -> list[int]:
        """Token ids of the prompt. Raises ValueError if it cannot be tokenized."""
        if self.form == "token_ids":
            return list(self.value)
        if tokenizer is None:
            raise ValueError(
                f"{self.form} requires a tokenizer and the model has none; give token_ids"
            )
        if self.form == "prompt":
            return tokenizer.encode(self.value)
        try:
            return tokenizer.encode_chat(self.value)
        except WeightsError as error:
            raise ValueError(str(error)) from None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The run's parameters with the line's overrides. Raises ValueError."""
        overrides = dict(self.overrides)
        if isinstance(overrides.get("stop"), list | str):
            overrides["stop"] = (
                (overrides["stop"],)
                if isinstance(overrides["stop"], str)
                else tuple(overrides["stop"])
            )
        return replace(defaults, **overrides)


def read_prompts(path: Path) -> list[PromptLine]:
    """All lines except empty ones. Raises UserError naming the first that is wrong."""
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(
            f"generate.input: {path} cannot be read: {error.strerror}; give an existing file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"generate.input: {path} is not UTF-8 at byte {error.start}; write it as UTF-8"
        ) from None
    lines = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                lines.append(_parse_line(number, text))
            except ValueError as error:
                raise UserError(f"generate.input: {path} line {number}: {error}") from None
    return lines


def _parse_line(number: int, text: str) -> PromptLine:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError('it is not a JSON object; write {"id": 1, "prompt": "…"}')
    forms = [form for form in _FORMS if value.get(form) is not None]
    if "id" not in value or len(forms) != 1:
        message = (
            "it has no id"
            if "id" not in value
            else f"it has {' and '.join(forms) or 'nothing to answer'}"
        )
        raise ValueError(f"{message}; a line needs an id and one of prompt, messages, token_ids")
    form = forms[0]
    if unknown := sorted(value.keys() - _OVERRIDES - {"id", *_FORMS}):
        raise ValueError(
            f"unknown field {unknown[0]!r}; besides id and {form}, a line may have "
            f"{sorted(_OVERRIDES)}"
        )
    if not PROMPT_CHECKS[form](value[form]):
        raise ValueError(f"{form} must be {_EXPECTED[form]}")
    overrides = {
        name: value for name, value in value.items() if name in _OVERRIDES and value is not None
    }
    line = PromptLine(number, value["id"], form, value[form], overrides)
    line.sampling(SamplingParams())  # report a wrong parameter before generation starts
    return line


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and "content" in message
            for message in value
        )
    )


PROMPT_CHECKS: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda value: isinstance(value, str),
    "messages": _are_messages,
    "token_ids": lambda value: isinstance(value, list) and all(type(id) is int for id in value),
}
_EXPECTED = {
    "prompt": "a string",
    "messages": "a list of {role, content}",
    "token_ids": "a list of integers",
}
