"""What an answer must look like, as llguidance reads it: from a JSON schema, a regular expression,
a Lark grammar.

Loads llguidance alone; knows no tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from workers.inference.sampling.parameters import SamplingParams

# between two parts of JSON: a line break and an indent, but never blanks until the answer's room is
# used up
_WHITESPACE = r"[ \n]{0,12}"


def grammar_of(asked: SamplingParams) -> str:
    """Raises ValueError, naming the parameter, for a form that is malformed or that nothing meets."""
    from llguidance import LLMatcher

    name, given = form_of(asked)
    try:
        if name == "regex":
            text = LLMatcher.grammar_from_regex(given)
        elif name == "grammar":
            text = LLMatcher.grammar_from_lark(given)
        else:
            text = LLMatcher.grammar_from_json_schema(given, {"whitespace_pattern": _WHITESPACE})
    except ValueError as error:  # what its reader says of a schema that nests too deep
        raise ValueError(f"{name} cannot be met: {_first_line(str(error))}") from None
    if wrong := LLMatcher.validate_grammar(text):
        raise ValueError(f"{name} cannot be met: {_first_line(wrong)}")
    return text


def form_of(asked: SamplingParams) -> tuple[str, str]:
    """The parameter that says what the answer must look like, and what it says.

    Raises ValueError.
    """
    if asked.regex is not None:
        return "regex", asked.regex
    return (
        ("grammar", asked.grammar)
        if asked.grammar is not None
        else ("json_schema", _schema(asked.json_schema))
    )


def _schema(given: Any) -> str:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(
                f"json_schema is not JSON: {error}; give a schema as an object"
            ) from None
    if given is True:
        given = {}
    if not isinstance(given, dict):
        raise ValueError(
            f"json_schema is {json.dumps(given)[:60]}; it must be an object that something can meet"
        )
    try:
        return json.dumps(given)
    except RecursionError:
        raise ValueError(
            "json_schema nests too deep; try one that refers to its parts by $ref"
        ) from None


def _first_line(text: str) -> str:
    line = next((each.strip() for each in text.splitlines() if each.strip()), text)
    return line.removeprefix("ERROR:").strip()[:200]
