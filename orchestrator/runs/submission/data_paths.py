"""Which files a spec may name: under the allowed roots after symlinks, there, and text where text
is asked for.

Reads the first and last megabyte of a text, never the whole of it. Knows the control plane's view
of the disk only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workers.contracts import ModelSource, Problem, RunSpec
from workers.contracts.specs.data import SUFFIXES, DataSpec

_LOOK_BYTES = 2**20
_LOOK_FILES = 20  # of a folder
_LARGEST_TOKENIZER_BYTES = 2**26


def path_problems(
    spec: RunSpec, *, data_roots: Sequence[Path], run_root: Path, models_root: Path | None = None
) -> list[Problem]:
    """What is wrong with the paths of a spec. Weights and tokenizers may also lie under `run_root`,
    by checkpoints,
    and weights under `models_root`, where they are fetched to."""
    found: list[Problem] = []
    for field, path, format in _data(spec):
        found += _file(field, path, format, data_roots)
    for field, path in _tokenizers(spec):
        found += _tokenizer(
            field, path, spec.shape.vocab if spec.shape else None, [*data_roots, run_root]
        )
    for field, path in _models(spec):
        found += _there(
            field, path, [*data_roots, run_root, *([models_root] if models_root else [])]
        )[1]
    if spec.generate:
        found += _output("generate.output", spec.generate.output, data_roots)
    if spec.script and spec.script.workdir is not None:
        resolved, problems = _there("script.workdir", spec.script.workdir, data_roots)
        found += problems
        if resolved is not None and not resolved.is_dir():
            message = f"{spec.script.workdir} is not a folder"
            found.append(_problem("script.workdir", message, "the folder of the program"))
    return found


def with_absolute_paths(
    given: dict[str, Any], *, data_roots: Sequence[Path], models_root: Path | None = None
) -> dict[str, Any]:
    """The spec with relative data paths put under the root that has them (the first one where none
    has).

    A relative `generate.output` stays: it lies in the run's own folder.
    """
    made = dict(given)
    places = (
        ("generate", "input"),
        ("evaluate", "input"),
        ("evaluate", "references"),
        ("script", "workdir"),
        ("model", "path"),
    )
    for part, name in places:
        body = made.get(part)
        # `smollm2-135m-instruct`, `runs/12`: by the names that fetched models and runs have in the
        # data directory
        named = [models_root, models_root.parent] if models_root and part == "model" else []
        roots = [*data_roots, *named]
        if isinstance(body, dict) and isinstance(body.get(name), str) and data_roots:
            made[part] = {**body, name: str(_absolute(body[name], roots))}
    for kind in ("serve", "generate"):
        body = made.get(kind)
        draft = body.get("draft") if isinstance(body, dict) else None
        if isinstance(draft, dict) and isinstance(draft.get("path"), str) and data_roots:
            roots = [*data_roots, *([models_root, models_root.parent] if models_root else [])]
            made[kind] = {
                **made[kind],
                "draft": {**draft, "path": str(_absolute(draft["path"], roots))},
            }
    if data_roots:
        made = _with_absolute_data(made, data_roots)
        train = made.get("train")
        if isinstance(train, dict) and isinstance(train.get("eval"), dict):
            made["train"] = {**train, "eval": _with_absolute_data(train["eval"], data_roots)}
        source = train.get("init_from") if isinstance(train, dict) else None
        if isinstance(source, dict) and isinstance(source.get("path"), str):
            roots = [*data_roots, *([models_root] if models_root else [])]
            made["train"] = {
                **made["train"],
                "init_from": {**source, "path": str(_absolute(source["path"], roots))},
            }
    return made


def _with_absolute_data(body: dict[str, Any], roots: Sequence[Path]) -> dict[str, Any]:
    data = body.get("data")
    if not isinstance(data, dict):
        return body
    made = dict(data)
    for name in ("path", "tokenizer"):
        if isinstance(made.get(name), str) and (name, made[name]) != ("tokenizer", "bytes"):
            made[name] = str(_absolute(made[name], roots))
    if isinstance(made.get("sources"), list):
        made["sources"] = [
            {**source, "path": str(_absolute(source["path"], roots))}
            if isinstance(source, dict) and isinstance(source.get("path"), str)
            else source
            for source in made["sources"]
        ]
    return {**body, "data": made}


def _data(spec: RunSpec) -> Iterator[tuple[str, str, str]]:
    """`(field, path, format)` of everything that is read as data."""
    for field, data in _data_specs(spec):
        for place, source in data.parts(field):
            if source.path is not None:
                yield f"{place}.path", source.path, source.format
    if spec.generate:
        yield "generate.input", spec.generate.input, "jsonl"
    if spec.evaluate:
        for name in ("input", "references"):
            path = getattr(spec.evaluate, name)
            if path is not None:
                yield f"evaluate.{name}", path, "any"


def _data_specs(spec: RunSpec) -> Iterator[tuple[str, DataSpec]]:
    yield "data", spec.data
    if spec.train and spec.train.eval and spec.train.eval.data:
        yield "train.eval.data", spec.train.eval.data


def _tokenizers(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for field, data in _data_specs(spec):
        if isinstance(data.tokenizer, str) and data.tokenizer != "bytes":
            yield f"{field}.tokenizer", data.tokenizer


def _models(spec: RunSpec) -> Iterator[tuple[str, str]]:
    sources: list[tuple[str, object]] = [("model", spec.model)]
    if spec.train:
        sources.append(("train.init_from", spec.train.init_from))
    for field in ("generate", "serve"):
        body = getattr(spec, field)
        if body is not None:
            sources.append((f"{field}.draft", body.draft))
    for field, source in sources:
        if isinstance(source, ModelSource) and source.path is not None:
            yield f"{field}.path", source.path


def _absolute(path: str, roots: Sequence[Path]) -> Path:
    given = Path(path).expanduser()
    if given.is_absolute():
        return given
    return next((root / given for root in roots if (root / given).exists()), roots[0] / given)


def _there(field: str, path: str, roots: Sequence[Path]) -> tuple[Path | None, list[Problem]]:
    """`(resolved path, [])`, or None and the problem.

    What lies outside is told the same whether it exists or not.
    """
    allowed = ", ".join(str(root) for root in roots)
    if "\0" in path:
        return None, [_problem(field, "the path holds a NUL character", "a path without it")]
    absolute = _absolute(path, roots)
    resolved = Path(os.path.realpath(absolute))
    if not any(resolved.is_relative_to(os.path.realpath(root)) for root in roots):
        return None, [
            _problem(
                field, f"{path} does not lie under the allowed folders", f"a path under {allowed}"
            )
        ]
    if not resolved.exists():
        return None, [
            _problem(field, f"{path} does not exist", f"a file that is there, under {allowed}")
        ]
    return resolved, []


def _output(field: str, path: str, roots: Sequence[Path]) -> list[Problem]:
    if not Path(path).expanduser().is_absolute():
        if not path.strip() or ".." in Path(path).parts or Path(path).name in ("", "."):
            return [_problem(field, f"{path!r} is no file in the run's folder", "answers.jsonl")]
        return []
    folder = os.path.dirname(path) or "."
    return _there(field, folder, roots)[1]


def _file(field: str, path: str, format: str, roots: Sequence[Path]) -> list[Problem]:
    resolved, problems = _there(field, path, roots)
    if resolved is None:
        return problems
    if resolved.is_dir() and format in SUFFIXES:
        names = SUFFIXES[format]
        files = sorted(
            each for each in resolved.iterdir() if each.suffix in names and each.is_file()
        )
        if not files:
            message = (
                f"{path} is not a file, and a folder without "
                f"{' or '.join(f'*{name}' for name in names)}"
            )
            return [_problem(field, message, f"a {format} file, or a folder of such")]
        return [
            item for each in files[:_LOOK_FILES] for item in _file(field, str(each), format, roots)
        ][:1]
    if not resolved.is_file():
        return [_problem(field, f"{path} is not a file", "one file")]
    try:
        size = resolved.stat().st_size
        with open(resolved, "rb") as file:
            first = file.read(_LOOK_BYTES)
            file.seek(max(0, size - _LOOK_BYTES))
            last = file.read(_LOOK_BYTES)
    except OSError as error:
        return [
            _problem(
                field,
                f"{path} cannot be read: {error.strerror}",
                "read permission for Orrery's user",
            )
        ]
    if not size:
        return [_problem(field, f"{path} is empty", "a file with something in it")]
    if format not in ("text", "jsonl"):
        return []
    whole = size <= _LOOK_BYTES
    wrong = _not_text(first, cut_end=not whole) or (
        None if whole else _not_text(last, cut_start=True)
    )
    if wrong:
        return [
            _problem(field, f"{path} is not UTF-8 text: {wrong}", "converting it: iconv -t UTF-8")
        ]
    return _not_jsonl(field, path, first) if format == "jsonl" else []


def _tokenizer(field: str, path: str, vocab: int | None, roots: Sequence[Path]) -> list[Problem]:
    """A tokenizer.json, or a folder with one, whose token ids the model's vocabulary has."""
    resolved, problems = _there(field, path, roots)
    if resolved is None:
        return problems
    file = resolved / "tokenizer.json" if resolved.is_dir() else resolved
    try:
        if file.stat().st_size > _LARGEST_TOKENIZER_BYTES:
            raise ValueError(f"more than {_LARGEST_TOKENIZER_BYTES} bytes")
        largest = _largest_id(json.loads(file.read_bytes()))
    except OSError as error:
        return [
            _problem(
                field,
                f"{file} cannot be read: {error.strerror}",
                "a tokenizer.json, or a folder with one",
            )
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [_problem(field, f"{path} is not a tokenizer.json: {error}", "a Hugging Face one")]
    if vocab is not None and largest >= vocab:
        message = f"{path} has token ids up to {largest}, the model's vocabulary has {vocab}"
        return [
            _problem(field, message, f"the tokenizer of this model, or vocab {largest + 1} or more")
        ]
    return []


def _largest_id(document: Any) -> int:
    """Of a tokenizer.json: `model.vocab` maps tokens to ids, or lists them in order (Unigram), and
    tokens are added.
    """
    vocab = document["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return max(
        -1, *map(int, ids), *(int(token["id"]) for token in document.get("added_tokens", []))
    )


def _not_text(raw: bytes, *, cut_start: bool = False, cut_end: bool = False) -> str | None:
    """What is wrong, where the piece may begin or end within a character (which has at most 4
    bytes).
    """
    if 0 in raw:
        return f"a NUL byte at offset {raw.index(0)}" + (
            " of its last megabyte" if cut_start else ""
        )
    start = 0
    while cut_start and start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1
    try:
        raw[start:].decode()
    except UnicodeDecodeError as error:
        if (
            cut_end
            and error.start + start >= len(raw) - 3
            and error.reason == "unexpected end of data"
        ):
            return None
        place = " of its last megabyte" if cut_start else ""
        return f"byte 0x{raw[start + error.start]:02x} at offset {start + error.start}{place}"
    return None


def _not_jsonl(field: str, path: str, first: bytes) -> list[Problem]:
    line, newline, _ = first.partition(b"\n")
    if not newline and len(first) == _LOOK_BYTES:
        return []  # one very long line; its reader will judge
    try:
        json.loads(line)
    except ValueError as error:
        return [
            _problem(
                field, f"the first line of {path} is not JSON: {error}", "one JSON object a line"
            )
        ]
    return []


def _problem(field: str, message: str, hint: str) -> Problem:
    return Problem(field=field, message=message, hint=hint)
