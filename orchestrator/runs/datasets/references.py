"""Where a spec names data sets: `dataset` of its data, or a text `dataset:NAME` for a path.

Pure: reads and rewrites specs only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from workers.contracts.specs.data import DATA_SET_PREFIX, data_set_in_text

# texts of a spec that may name a data set; * stands for any name or number
_TEXT_FIELDS: Final = (
    "generate.input",
    "evaluate.input",
    "evaluate.references",
    "train.evaluate.input",
    "train.evaluate.references",
    "produce.seeds",
    "produce.filters.*.against",
    "script.command.*",
    "script.env.*",
)
# the beginning or the end of a field → what the data is used as
_USES: Final = (
    (r"train\.eval\.", "validation_data"),
    (r".*\.references$", "references"),
    (r"(train\.)?evaluate\.input$|generate\.input$", "prompts"),
    (r"produce\.seeds$", "seeds"),
    (r"produce\.filters\.", "excluded"),
)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Reference(NamedTuple):
    """`field` gets the path of the data set `label` (`NAME` or `NAME@VERSION`).

    `place` is the field to show in messages; `data` is the body with `dataset`, None of a text.
    """

    field: str
    place: str
    label: str
    data: dict[str, Any] | None = None

    @property
    def use(self) -> str:
        """What the data set is used as."""
        return next((use for start, use in _USES if re.match(start, self.field)), "data")

    @property
    def read_by_nodes(self) -> bool:
        """Whether nodes of this run need the files; a later run needs those of `train.evaluate`."""
        return not self.field.startswith("train.evaluate.")


def references(spec: Mapping[str, Any]) -> Iterator[Reference]:
    """Every place of a spec that names a data set."""
    for field, data in _bodies(spec):
        yield Reference(f"{field}.path", f"{field}.dataset", str(data["dataset"]), data)
    for pattern in _TEXT_FIELDS:
        for field, text in _texts(spec, pattern.split("."), ""):
            label = data_set_in_text(text, after_equals=field.startswith("script.command."))
            if label is not None:
                yield Reference(field, field, label)


def replaced(value: Any, names: list[str], old: str, new: str) -> Any:
    """A copy of the value whose text at `names` names the data set `new` instead of `old`."""
    if not names:
        return str(value).removesuffix(DATA_SET_PREFIX + old) + DATA_SET_PREFIX + new
    first, *rest = names
    if isinstance(value, list):
        place = int(first)
        return [
            replaced(each, rest, old, new) if number == place else each
            for number, each in enumerate(value)
        ]
    return {**value, first: replaced(value[first], rest, old, new)}


def _bodies(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(field, data)` of training and validation data, and of their sources."""
    train = spec.get("train")
    evaluated = train.get("eval") if isinstance(train, Mapping) else None
    bodies = [("data", spec.get("data"))]
    if isinstance(evaluated, Mapping):
        bodies.append(("train.eval.data", evaluated.get("data")))
    for field, data in bodies:
        if not isinstance(data, dict):
            continue
        sources = data.get("sources")
        listed = enumerate(sources) if isinstance(sources, list) else ()
        for place, body in [(field, data), *((f"{field}.sources.{n}", each) for n, each in listed)]:
            if isinstance(body, dict) and isinstance(body.get("dataset"), str):
                yield place, body


def _texts(value: Any, names: list[str], field: str) -> Iterator[tuple[str, str]]:
    """`(field, text)` of the texts at a pattern."""
    if not names:
        if isinstance(value, str):
            yield field, value
        return
    first, *rest = names
    matches: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        matches = [
            (name, each)
            for name, each in value.items()
            if name == first or (first == "*" and _VARIABLE.fullmatch(str(name)))
        ]
    elif isinstance(value, list) and first == "*":
        matches = [(str(number), each) for number, each in enumerate(value)]
    for name, each in matches:
        yield from _texts(each, rest, f"{field}.{name}" if field else name)
