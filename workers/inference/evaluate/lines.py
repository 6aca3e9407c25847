"""Input of an evaluate run: documents, multiple-choice questions, prompts, answers, references.

Reads text and JSON lines and checks each line. Does not depend on tokens; loads no torch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.contracts.specs.data import EXAMPLE_FORMATS, SUFFIXES, DataSpec
from workers.inference.evaluate.example_items import read_examples
from workers.inference.evaluate.items import EvaluationItem
from workers.inference.evaluate.metrics import ANSWERS, CHOICES
from workers.inference.generate.prompts import PROMPT_CHECKS, PromptLine
from workers.runtime.exit_codes import UserError

# a data file of the training engine; the engines do not import each other
_PRESETS = {
    "shakespeare": Path(__file__).parents[2] / "training" / "corpora" / "shakespeare.txt.gz"
}
_FORMS = ("prompt", "messages", "token_ids")
_OTHER_FIELDS = (
    "id",
    "text",
    "reference",
    "references",
    "choices",
    "answer",
    "finish_reason",
    "logprobs",
)


def read_items(
    input_: str | None, references: str | None, data: DataSpec, metrics: Sequence[str]
) -> list[EvaluationItem]:
    """Read the items and their references.

    Raises UserError naming the file, the line and the problem, or a line that a metric cannot
    evaluate.
    """
    if input_ is None:
        items = read_texts(data)
    elif input_.endswith(".jsonl"):
        rows = enumerate(_text(Path(input_), "evaluate.input").split("\n"), 1)
        items = [
            _parse_item(number, row, f"evaluate.input: {input_}")
            for number, row in rows
            if row.strip()
        ]
    else:
        items = [EvaluationItem(Path(input_).name, _text(Path(input_), "evaluate.input"))]
    if not items or not any(item.text != "" for item in items):
        raise UserError(
            f"evaluate.input: {input_ or 'the data'} is empty; give a file with text or lines"
        )
    if references is not None:
        items = _add_references(items, Path(references))
    _check(items, metrics, input_ or "the run's data")
    return items


def _check(items: Sequence[EvaluationItem], metrics: Sequence[str], where: str) -> None:
    choice_metric = next((name for name in metrics if name in CHOICES), None)
    answer_metric = next((name for name in metrics if name in ANSWERS), None)
    for number, item in enumerate(items, 1):
        if choice_metric and (not item.choices or item.right is None):
            message = f"item {number} (id {item.id!r}) has no prompt with choices and an answer"
            hint = 'Write {"id": 1, "prompt": "…", "choices": ["…", "…"], "answer": 0}.'
            raise UserError(
                f"evaluate.metrics: {choice_metric} needs choices, {where}: {message}. {hint}"
            )
        if answer_metric and not item.references:
            message = f"item {number} (id {item.id!r}) has no reference"
            raise UserError(
                f"evaluate.metrics: {answer_metric} needs references, {where}: {message}; give "
                "evaluate.references"
            )


def _parse_item(number: int, row: str, where: str) -> EvaluationItem:
    where = f"{where} line {number}"
    value = _object(row, where)
    forms = [form for form in _FORMS if value.get(form) is not None]
    text = value.get("text")
    if unknown := sorted(value.keys() - {*_FORMS, *_OTHER_FIELDS}):
        raise UserError(
            f"{where}: unknown field {unknown[0]!r}; the fields are "
            f"{', '.join((*_FORMS, *_OTHER_FIELDS))}"
        )
    if text is None and len(forms) != 1:
        message = f"it has {' and '.join(forms)}" if forms else "there is nothing to evaluate"
        raise UserError(f"{where}: {message}; a line needs text, or one of {', '.join(_FORMS)}")
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: text must be a string")
    prompt = None
    if text is None:  # token_ids next to text belong to a finished answer
        form = forms[0]
        if not PROMPT_CHECKS[form](value[form]):
            raise UserError(
                f"{where}: {form} is not a valid prompt; see the lines of a generate run"
            )
        prompt = PromptLine(number, value.get("id", number), form, value[form], {})
    choices, right = _choices(value, where)
    return EvaluationItem(
        value.get("id", number), text, prompt, _references(value, where), choices, right
    )


def _choices(value: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], int | None]:
    choices, right = value.get("choices"), value.get("answer")
    if choices is None:
        return (), None
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise UserError(f"{where}: choices must be a list of at least two strings")
    if isinstance(right, str) and right in choices:
        right = choices.index(right)
    if type(right) is not int or not 0 <= right < len(choices):
        raise UserError(
            f"{where}: answer is {right!r}; it must be one of the choices, or its index from 0"
        )
    return tuple(choices), right


def _references(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    references = row.get("references", row.get("reference"))
    if references is None and "choices" not in row and isinstance(row.get("answer"), str):
        references = row["answer"]
    if references is None:
        return ()
    texts = [references] if isinstance(references, str) else references
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: references must be a string or a list of strings")
    return tuple(texts)


def _add_references(items: list[EvaluationItem], path: Path) -> list[EvaluationItem]:
    """By id from JSON lines, by position from a text with one reference per line."""
    where = f"evaluate.references: {path}"
    rows = _text(path, "evaluate.references").split("\n")
    if path.suffix != ".jsonl":
        rows = rows[:-1] if rows and not rows[-1] else rows
        if len(rows) != len(items):
            raise UserError(
                f"{where} has {len(rows)} lines, the input {len(items)}; give one for each"
            )
        return [replace(item, references=(row,)) for item, row in zip(items, rows, strict=True)]
    by_id: dict[str, tuple[str, ...]] = {}
    for number, row in enumerate(rows, 1):
        if row.strip():
            value = _object(row, f"{where} line {number}")
            if "id" not in value:
                raise UserError(
                    f"{where} line {number} has no id; give the id of the line that it belongs to"
                )
            key = json.dumps(value["id"], sort_keys=True)
            if key in by_id:
                raise UserError(
                    f"{where} line {number}: id {value['id']!r} occurs twice; give each once"
                )
            texts = _references({"reference": value.get("text"), **value}, f"{where} line {number}")
            if not texts:
                raise UserError(
                    f"{where} line {number} has no reference; write it as text, reference or "
                    "references"
                )
            by_id[key] = texts
    keys = [json.dumps(item.id, sort_keys=True) for item in items]
    if missing := [item.id for item, key in zip(items, keys, strict=True) if key not in by_id]:
        message = (
            f"has none for {len(missing)} of {len(items)} lines, the first is id {missing[0]!r}"
        )
        raise UserError(f"{where} {message}; give one for each")
    if len(by_id) != len(set(keys)):
        extra = next(key for key in by_id if key not in set(keys))
        raise UserError(
            f"{where} has {len(by_id)} lines, the input {len(set(keys))}: id {extra} is not in the "
            "input"
        )
    return [replace(item, references=by_id[key]) for item, key in zip(items, keys, strict=True)]


def read_texts(data: DataSpec, *, held_out: bool = True) -> list[EvaluationItem]:
    """The held-out part of each source, as in training: the last tenth of its text, or of its
    documents if it has several; or the part before it. Raises UserError.
    """
    items = []
    for field, part in data.parts():
        if not part.is_text:
            raise UserError(
                f"{field}: token files have no text to evaluate; give evaluate.input, or text"
            )
        if part.format in EXAMPLE_FORMATS:
            items += read_examples(Path(str(part.path)), part.format, f"{field}.path")
            continue
        if part.preset is not None:
            texts = [
                (part.label, gzip.decompress(_PRESETS[part.preset].read_bytes()).decode("utf-8"))
            ]
        else:
            texts = _documents(Path(str(part.path)), part.format, field)
        if len(texts) == 1:
            (name, text) = texts[0]
            middle = len(text) - len(text) // 10 if len(text) >= 10 else 0
            items.append(
                EvaluationItem(name, text[middle:] if held_out else text[: middle or None])
            )
        else:
            middle = len(texts) - max(1, len(texts) // 10)
            items += [
                EvaluationItem(name, text)
                for name, text in (texts[middle:] if held_out else texts[:middle])
            ]
    return items


def _documents(path: Path, format_: str, field: str) -> list[tuple[Any, str]]:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES[format_])
    if format_ == "text":
        return [(file.name, _text(file, f"{field}.path")) for file in files]
    rows = [
        (f"{file}", number, row)
        for file in files
        for number, row in enumerate(_text(file, f"{field}.path").split("\n"), 1)
        if row.strip()
    ]
    documents = []
    for name, number, row in rows:
        text = _object(row, f"{field}.path: {name} line {number}").get("text")
        if not isinstance(text, str):
            raise UserError(f'{field}.path: {name} line {number} is not {{"text": "…"}}')
        documents.append((number, text))
    return documents


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{field}: {path} cannot be read: {error.strerror}; give an existing file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{field}: {path} is not UTF-8 at byte {error.start}; write it as UTF-8"
        ) from None


def _object(row: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: it is not a JSON object; write one per line")
    return value
