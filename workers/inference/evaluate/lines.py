"""What an evaluate run judges: documents, questions with choices, prompts or finished answers, and
their references.

Reads text and JSON lines, each line checked. Knows no tokens and loads no torch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.contracts.specs.data import SUFFIXES, DataSpec
from workers.inference.evaluate.metrics import ANSWERS, CHOICES
from workers.inference.generate.prompts import GOOD, Line
from workers.runtime.exits import UserError

# a file of the training engine's, not a module: neither engine knows the other
_PRESETS = {
    "shakespeare": Path(__file__).parents[2] / "training" / "corpora" / "shakespeare.txt.gz"
}
_FORMS = ("prompt", "messages", "token_ids")
_MORE = ("id", "text", "reference", "references", "choices", "answer", "finish_reason", "logprobs")


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to judge.

    `text` is a document or a finished answer; `asks` a prompt, by its form; else None.
    """

    id: Any
    text: str | None = None
    asks: Line | None = None
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    right: int | None = None


def read_items(
    input_: str | None, references: str | None, data: DataSpec, metrics: Sequence[str]
) -> list[Item]:
    """Raises UserError naming the file, the line and what is wrong, or which line a metric cannot
    judge.
    """
    if input_ is None:
        items = read_texts(data)
    elif input_.endswith(".jsonl"):
        rows = enumerate(_text(Path(input_), "evaluate.input").split("\n"), 1)
        items = [
            _item(number, row, f"evaluate.input: {input_}") for number, row in rows if row.strip()
        ]
    else:
        items = [Item(Path(input_).name, _text(Path(input_), "evaluate.input"))]
    if not items or not any(each.text != "" for each in items):
        raise UserError(
            f"evaluate.input: {input_ or 'the data'} is empty; give a file with text or lines"
        )
    if references is not None:
        items = _with_references(items, Path(references))
    _check(items, metrics, input_ or "the run's data")
    return items


def _check(items: Sequence[Item], metrics: Sequence[str], where: str) -> None:
    wants_choices = next((name for name in metrics if name in CHOICES), None)
    wants_answers = next((name for name in metrics if name in ANSWERS), None)
    for number, item in enumerate(items, 1):
        if wants_choices and (not item.choices or item.right is None):
            message = f"item {number} (id {item.id!r}) has no prompt with choices and an answer"
            tries = 'write {"id": 1, "prompt": "…", "choices": ["…", "…"], "answer": 0}'
            raise UserError(
                f"evaluate.metrics: {wants_choices} asks for choices, {where}: {message}; {tries}"
            )
        if wants_answers and not item.references:
            message = f"item {number} (id {item.id!r}) has no reference"
            raise UserError(
                f"evaluate.metrics: {wants_answers} compares, {where}: {message}; give "
                "evaluate.references"
            )


def _item(number: int, row: str, where: str) -> Item:
    where = f"{where} line {number}"
    given = _object(row, where)
    forms = [form for form in _FORMS if given.get(form) is not None]
    text = given.get("text")
    if unknown := sorted(given.keys() - {*_FORMS, *_MORE}):
        raise UserError(
            f"{where}: {unknown[0]!r} is no field; there may be {', '.join((*_FORMS, *_MORE))}"
        )
    if text is None and len(forms) != 1:
        message = f"it has {' and '.join(forms)}" if forms else "there is nothing to judge"
        raise UserError(f"{where}: {message}; a line wants text, or one of {', '.join(_FORMS)}")
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: text must be a text")
    asks = None
    if text is None:  # token_ids beside a text are those of a finished answer
        form = forms[0]
        if not GOOD[form](given[form]):
            raise UserError(
                f"{where}: {form} is not what a prompt may be; see the lines of a generate run"
            )
        asks = Line(number, given.get("id", number), form, given[form], {})
    choices, right = _choices(given, where)
    return Item(given.get("id", number), text, asks, _references(given, where), choices, right)


def _choices(given: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], int | None]:
    choices, right = given.get("choices"), given.get("answer")
    if choices is None:
        return (), None
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(each, str) and each for each in choices)
    ):
        raise UserError(f"{where}: choices must be a list of at least two texts")
    if isinstance(right, str) and right in choices:
        right = choices.index(right)
    if type(right) is not int or not 0 <= right < len(choices):
        raise UserError(
            f"{where}: answer is {right!r}; it must be one of the choices, or its place from 0"
        )
    return tuple(choices), right


def _references(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    told = given.get("references", given.get("reference"))
    if told is None and "choices" not in given and isinstance(given.get("answer"), str):
        told = given["answer"]
    found = [told] if isinstance(told, str) else told if told is not None else []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UserError(f"{where}: references must be a text or a list of texts")
    return tuple(found)


def _with_references(items: list[Item], path: Path) -> list[Item]:
    """By id from JSON lines, by place from a text with one a line."""
    where = f"evaluate.references: {path}"
    rows = _text(path, "evaluate.references").split("\n")
    if path.suffix != ".jsonl":
        rows = rows[:-1] if rows and not rows[-1] else rows
        if len(rows) != len(items):
            raise UserError(
                f"{where} has {len(rows)} lines, the input {len(items)}; give one for each"
            )
        return [replace(item, references=(row,)) for item, row in zip(items, rows, strict=True)]
    found: dict[str, tuple[str, ...]] = {}
    for number, row in enumerate(rows, 1):
        if row.strip():
            given = _object(row, f"{where} line {number}")
            if "id" not in given:
                raise UserError(
                    f"{where} line {number} has no id; give the id of the line that it belongs to"
                )
            key = json.dumps(given["id"], sort_keys=True)
            if key in found:
                raise UserError(
                    f"{where} line {number}: id {given['id']!r} was there before; give each once"
                )
            told = _references({"reference": given.get("text"), **given}, f"{where} line {number}")
            if not told:
                raise UserError(
                    f"{where} line {number} has no reference; write it as text, reference or "
                    "references"
                )
            found[key] = told
    keys = [json.dumps(item.id, sort_keys=True) for item in items]
    if missing := [item.id for item, key in zip(items, keys, strict=True) if key not in found]:
        message = (
            f"has none for {len(missing)} of {len(items)} lines, the first is id {missing[0]!r}"
        )
        raise UserError(f"{where} {message}; give one for each")
    if len(found) != len(set(keys)):
        extra = next(key for key in found if key not in set(keys))
        raise UserError(
            f"{where} has {len(found)} lines, the input {len(set(keys))}: id {extra} is not asked "
            "for"
        )
    return [replace(item, references=found[key]) for item, key in zip(items, keys, strict=True)]


def read_texts(data: DataSpec, *, held_out: bool = True) -> list[Item]:
    """The last tenth of each source's text, or of its documents where it has several, as a training
    holds it out; or
    what is before it. Raises UserError."""
    found = []
    for field, part in data.parts():
        if not part.is_text:
            raise UserError(
                f"{field}: token files have no text to judge; give evaluate.input, or text"
            )
        if part.preset is not None:
            texts = [
                (part.label, gzip.decompress(_PRESETS[part.preset].read_bytes()).decode("utf-8"))
            ]
        else:
            texts = _documents(Path(str(part.path)), part.format, field)
        if len(texts) == 1:
            (name, text) = texts[0]
            middle = len(text) - len(text) // 10 if len(text) >= 10 else 0
            found.append(Item(name, text[middle:] if held_out else text[: middle or None]))
        else:
            middle = len(texts) - max(1, len(texts) // 10)
            found += [
                Item(name, text) for name, text in (texts[middle:] if held_out else texts[:middle])
            ]
    return found


def _documents(path: Path, format_: str, field: str) -> list[tuple[Any, str]]:
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES[format_])
    if format_ == "text":
        return [(file.name, _text(file, f"{field}.path")) for file in files]
    rows = [
        (f"{file}", number, row)
        for file in files
        for number, row in enumerate(_text(file, f"{field}.path").split("\n"), 1)
        if row.strip()
    ]
    found = []
    for name, number, row in rows:
        text = _object(row, f"{field}.path: {name} line {number}").get("text")
        if not isinstance(text, str):
            raise UserError(f'{field}.path: {name} line {number} is not {{"text": "…"}}')
        found.append((number, text))
    return found


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{field}: {path} cannot be read: {error.strerror}; give an existing file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{field}: {path} is no UTF-8 at byte {error.start}; write it as UTF-8"
        ) from None


def _object(row: str, where: str) -> Mapping[str, Any]:
    try:
        given = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: it is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise UserError(f"{where}: it is no JSON object; write one a line")
    return given
