"""Builds an llguidance grammar from a JSON schema, a regular expression or a Lark grammar.

Does not depend on a tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from workers.inference.sampling.parameters import SamplingParams

# between JSON tokens: a line break and an indent, but not unlimited blanks
WHITESPACE = r"[ \n]{0,12}"


def build_grammar(params: SamplingParams) -> str:
    """Raises ValueError, naming the parameter, for a malformed or unsatisfiable constraint."""
    from llguidance import LLMatcher

    name, value = get_constraint(params)
    try:
        if name == "regex":
            text = LLMatcher.grammar_from_regex(value)
        elif name == "grammar":
            text = LLMatcher.grammar_from_lark(value)
        else:
            text = LLMatcher.grammar_from_json_schema(value, {"whitespace_pattern": WHITESPACE})
    except ValueError as error:  # raised for a schema that nests too deep
        raise ValueError(f"{name} cannot be met: {_first_line(str(error))}") from None
    if problem := LLMatcher.validate_grammar(text):
        raise ValueError(f"{name} cannot be met: {_first_line(problem)}")
    return text


def get_constraint(params: SamplingParams) -> tuple[str, str]:
    """The name and value of the parameter that constrains the answer. Raises ValueError."""
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar", params.grammar
    return "json_schema", _schema(params.json_schema)


def _schema(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(
                f"json_schema is not JSON: {error}; give a schema as an object"
            ) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema is {json.dumps(schema)[:60]}; it must be a JSON object")
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ValueError(
            "json_schema nests too deep. Use one that refers to its parts by $ref."
        ) from None


def _first_line(text: str) -> str:
    line = next((row.strip() for row in text.splitlines() if row.strip()), text)
    return line.removeprefix("ERROR:").strip()[:200]
