"""The base class of every contract, and validation errors as problems with a field and a hint.

Does not depend on any particular contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode
from pydantic_core import ErrorDetails

CONTRACT_VERSION = 1

_INTEGER = TypeAdapter(int)
_LONGEST_PART = 120  # characters of a metric's name
_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Contract(BaseModel):
    """Frozen data exchanged between the control plane, the nodes and users' programs.

    Unknown fields are rejected. A field whose name is a Python keyword (`async`) has a trailing
    underscore in Python only.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data without unset optional fields."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_json(self) -> str:
        """JSON text without unset optional fields."""
        return self.model_dump_json(exclude_none=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises `pydantic.ValidationError`; `validation_problems` converts it to problems."""
        return cls.model_validate(dict(data))

    @classmethod
    def json_schema(cls, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        """JSON Schema (2020-12) of this contract, with its version under `x-version`."""
        schema = cls.model_json_schema(mode=mode)
        return {"$schema": _SCHEMA_DIALECT, "x-version": CONTRACT_VERSION, **schema}


class WireContract(Contract):
    """Data that only programs of this project exchange; unknown fields are ignored.

    So a newer sender may add fields before its receivers are upgraded.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class Problem(Contract):
    """What is wrong with one field, and a hint what to do: imperative sentences, or empty."""

    field: str
    # records of version 0.1 have the keys `says` and `try`
    message: str = Field(validation_alias=AliasChoices("message", "says"))
    hint: str = Field(default="", validation_alias=AliasChoices("hint", "try"))

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return with_hint(f"{where}{self.message}", self.hint)


def with_hint(message: str, hint: str) -> str:
    """`message. Hint.`, or the message alone without a hint."""
    return f"{message.rstrip('. ')}. {hint}" if hint else message


def as_sentences(problems: Sequence[Problem], most: int = 3) -> str:
    """The first problems, each as sentences that end with a full stop; the number of the others."""
    texts = [f"{str(problem).rstrip('. ')}." for problem in problems[:most]]
    if (more := len(problems) - most) > 0:
        texts.append(f"{more} more problem{'s' if more > 1 else ''}.")
    return " ".join(texts)


class Refused(ValueError):
    """Raised in validators: the field below the validated one, what is wrong, and a hint."""

    def __init__(self, message: str, hint: str = "", *, field: str = "") -> None:
        super().__init__(with_hint(message, hint))
        self.field, self.message, self.hint = field, message, hint


def derived(*, le: int = 2**31 - 1) -> Any:
    """An integer field whose default is derived from other fields before validation."""

    def without_default(schema: dict[str, Any]) -> None:
        schema.pop("default", None)

    return Field(default=0, ge=1, le=le, json_schema_extra=without_default)


def parse_integer(value: object) -> int | None:
    """The value that an integer field would accept: 8, 8.0 and "8" are 8; None if it refuses."""
    if isinstance(value, bool):
        return None
    try:
        return _INTEGER.validate_python(value)
    except ValidationError:
        return None


def reject_bool(value: object) -> object:
    """Refuses true and false for a number; pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise Refused(f"{str(value).lower()} is not a number", "Use an integer.")
    return value


def problem(field: str, message: str, hint: str = "") -> Problem:
    """Shorthand for a Problem."""
    return Problem(field=field, message=message, hint=hint)


def validation_problems(error: ValidationError, *, prefix: str = "") -> list[Problem]:
    """Each pydantic error as a Problem; fields are paths such as `train.seq_len` after `prefix`."""
    return [_problem(item, prefix) for item in error.errors(include_url=False)]


def _problem(item: ErrorDetails, prefix: str) -> Problem:
    context = item.get("ctx") or {}
    # parts with @ name the member of a union
    path = [prefix, *(_short(part) for part in item["loc"] if not str(part).startswith("@"))]
    cause = context.get("error")
    if isinstance(cause, Refused):
        message, hint = cause.message, cause.hint
        path.append(cause.field)
    else:
        name = _short(item["loc"][-1]) if item["loc"] else "the document"
        message, hint = _message_and_hint(item["type"], item["msg"], context, item["input"], name)
    return Problem(field=".".join(part for part in path if part), message=message, hint=hint)


def _message_and_hint(
    kind: str, message: str, context: Mapping[str, Any], value: object, name: str
) -> tuple[str, str]:
    """`(message, hint)` for one of pydantic's own errors on the field `name`."""
    shown = _shown(value)
    if kind == "missing":
        return f"{name} is missing and has no default", f"Add {name}."
    if kind == "extra_forbidden":
        return f"{name} is not a field of this contract", "Remove it, or check its spelling."
    if kind in {"literal_error", "enum"}:
        expected = str(context.get("expected", "the known values"))
        return f"{shown} is not one of {expected}", f"Use {expected}."
    bounds = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "more than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind == "too_long":
        most = context.get("max_length")
        return f"{name} has more than {most} entries", f"Use at most {most}."
    if kind in bounds:
        key, relation = bounds[kind]
        bound = f"{relation} {context.get(key)}"
        return f"{shown} is out of range; it must be {bound}", f"Use a value of {bound}."
    return f"{shown} is refused: {message[:1].lower()}{message[1:]}", ""


def _short(part: object) -> str:
    """A part of a path; a key may be a text of any length that a user sent."""
    text = str(part)
    return text if len(text) <= _LONGEST_PART else text[: _LONGEST_PART - 3] + "..."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
