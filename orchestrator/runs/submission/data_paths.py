"""Checks the paths of a spec: under the allowed roots after symlinks, existing, and valid text.

Reads only the first and last megabyte of a text file, on the control plane's own disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workers.contracts import ModelSource, Problem, RunSpec
from workers.contracts.specs.data import SUFFIXES, DataSpec

_CHECKED_BYTES = 2**20
_CHECKED_FILES = 20  # per folder
_LARGEST_TOKENIZER_BYTES = 2**26


def path_problems(
    spec: RunSpec, *, data_roots: Sequence[Path], run_root: Path, models_root: Path | None = None
) -> list[Problem]:
    """Problems with the paths of a spec.

    Weights and tokenizers may also be under `run_root` (checkpoints), and weights under
    `models_root` (downloads).
    """
    problems: list[Problem] = []
    for field, path, format in _data_files(spec):
        problems += _file_problems(field, path, format, data_roots)
    for field, path in _tokenizers(spec):
        problems += _tokenizer_problems(
            field, path, spec.shape.vocab if spec.shape else None, [*data_roots, run_root]
        )
    for field, path in _models(spec):
        problems += _resolve(
            field, path, [*data_roots, run_root, *([models_root] if models_root else [])]
        )[1]
    if spec.generate:
        problems += _output_problems("generate.output", spec.generate.output, data_roots)
    if spec.script and spec.script.workdir is not None:
        resolved, path_problems_ = _resolve("script.workdir", spec.script.workdir, data_roots)
        problems += path_problems_
        if resolved is not None and not resolved.is_dir():
            message = f"{spec.script.workdir} is not a folder"
            problems.append(_problem("script.workdir", message, "the folder of the program"))
    return problems


def with_absolute_paths(
    spec: dict[str, Any], *, data_roots: Sequence[Path], models_root: Path | None = None
) -> dict[str, Any]:
    """The spec with relative paths made absolute: under the first root that has them, or the first.

    A relative `generate.output` stays relative: it is in the run's own folder.
    """
    resolved = dict(spec)
    path_fields = (
        ("generate", "input"),
        ("evaluate", "input"),
        ("evaluate", "references"),
        ("script", "workdir"),
        ("model", "path"),
    )
    for part, name in path_fields:
        body = resolved.get(part)
        # `smollm2-135m-instruct`, `runs/12`: downloaded models and runs in the data directory
        named = [models_root, models_root.parent] if models_root and part == "model" else []
        roots = [*data_roots, *named]
        if isinstance(body, dict) and isinstance(body.get(name), str) and data_roots:
            resolved[part] = {**body, name: str(_absolute(body[name], roots))}
    for kind in ("serve", "generate"):
        body = resolved.get(kind)
        draft = body.get("draft") if isinstance(body, dict) else None
        if isinstance(draft, dict) and isinstance(draft.get("path"), str) and data_roots:
            roots = [*data_roots, *([models_root, models_root.parent] if models_root else [])]
            resolved[kind] = {
                **resolved[kind],
                "draft": {**draft, "path": str(_absolute(draft["path"], roots))},
            }
    if data_roots:
        resolved = _with_absolute_data(resolved, data_roots)
        train = resolved.get("train")
        if isinstance(train, dict) and isinstance(train.get("eval"), dict):
            resolved["train"] = {**train, "eval": _with_absolute_data(train["eval"], data_roots)}
        source = train.get("init_from") if isinstance(train, dict) else None
        if isinstance(source, dict) and isinstance(source.get("path"), str):
            roots = [*data_roots, *([models_root] if models_root else [])]
            resolved["train"] = {
                **resolved["train"],
                "init_from": {**source, "path": str(_absolute(source["path"], roots))},
            }
    return resolved


def _with_absolute_data(body: dict[str, Any], roots: Sequence[Path]) -> dict[str, Any]:
    data = body.get("data")
    if not isinstance(data, dict):
        return body
    resolved = dict(data)
    for name in ("path", "tokenizer"):
        value = resolved.get(name)
        if isinstance(value, str) and (name, value) != ("tokenizer", "bytes"):
            resolved[name] = str(_absolute(value, roots))
    if isinstance(resolved.get("sources"), list):
        resolved["sources"] = [
            {**source, "path": str(_absolute(source["path"], roots))}
            if isinstance(source, dict) and isinstance(source.get("path"), str)
            else source
            for source in resolved["sources"]
        ]
    return {**body, "data": resolved}


def _data_files(spec: RunSpec) -> Iterator[tuple[str, str, str]]:
    """`(field, path, format)` of all data files."""
    for field, data in _data_specs(spec):
        for source_field, source in data.parts(field):
            if source.path is not None:
                yield f"{source_field}.path", source.path, source.format
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
    expanded = Path(path).expanduser()
    if expanded.is_absolute():
        return expanded
    candidates = [root / expanded for root in roots]
    return next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def _resolve(field: str, path: str, roots: Sequence[Path]) -> tuple[Path | None, list[Problem]]:
    """`(resolved path, [])`, or None and the problem.

    Paths outside the roots give the same problem whether they exist or not.
    """
    allowed = ", ".join(str(root) for root in roots)
    if "\0" in path:
        return None, [_problem(field, "the path contains a NUL character", "a path without it")]
    absolute = _absolute(path, roots)
    resolved = Path(os.path.realpath(absolute))
    if not any(resolved.is_relative_to(os.path.realpath(root)) for root in roots):
        return None, [
            _problem(field, f"{path} is not under the allowed folders", f"a path under {allowed}")
        ]
    if not resolved.exists():
        return None, [
            _problem(field, f"{path} does not exist", f"an existing file under {allowed}")
        ]
    return resolved, []


def _output_problems(field: str, path: str, roots: Sequence[Path]) -> list[Problem]:
    if not Path(path).expanduser().is_absolute():
        if not path.strip() or ".." in Path(path).parts or Path(path).name in ("", "."):
            return [
                _problem(field, f"{path!r} is not a file name in the run's folder", "answers.jsonl")
            ]
        return []
    folder = os.path.dirname(path) or "."
    return _resolve(field, folder, roots)[1]


def _file_problems(field: str, path: str, format: str, roots: Sequence[Path]) -> list[Problem]:
    resolved, problems = _resolve(field, path, roots)
    if resolved is None:
        return problems
    if resolved.is_dir() and format in SUFFIXES:
        names = SUFFIXES[format]
        files = sorted(
            path for path in resolved.iterdir() if path.suffix in names and path.is_file()
        )
        if not files:
            patterns = " or ".join(f"*{name}" for name in names)
            message = f"{path} is not a file but a folder without {patterns}"
            return [_problem(field, message, f"a {format} file, or a folder with {format} files")]
        return [
            item
            for file in files[:_CHECKED_FILES]
            for item in _file_problems(field, str(file), format, roots)
        ][:1]
    if not resolved.is_file():
        return [_problem(field, f"{path} is not a file", "one file")]
    try:
        size = resolved.stat().st_size
        with open(resolved, "rb") as file:
            first = file.read(_CHECKED_BYTES)
            file.seek(max(0, size - _CHECKED_BYTES))
            last = file.read(_CHECKED_BYTES)
    except OSError as error:
        return [
            _problem(
                field,
                f"{path} cannot be read: {error.strerror}",
                "read permission for Orrery's user",
            )
        ]
    if not size:
        return [_problem(field, f"{path} is empty", "a file with content")]
    if format not in ("text", "jsonl"):
        return []
    complete = size <= _CHECKED_BYTES
    encoding_error = _utf8_error(first, truncated_end=not complete) or (
        None if complete else _utf8_error(last, truncated_start=True)
    )
    if encoding_error:
        return [
            _problem(
                field, f"{path} is not UTF-8 text: {encoding_error}", "convert it: iconv -t UTF-8"
            )
        ]
    return _jsonl_problems(field, path, first) if format == "jsonl" else []


def _tokenizer_problems(
    field: str, path: str, vocab: int | None, roots: Sequence[Path]
) -> list[Problem]:
    """Problems of a tokenizer.json, or a folder with one; its ids must be within the vocabulary."""
    resolved, problems = _resolve(field, path, roots)
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
    """The largest id in a tokenizer.json.

    `model.vocab` maps tokens to ids, or lists them in order (Unigram); `added_tokens` has more.
    """
    vocab = document["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return max(
        -1, *map(int, ids), *(int(token["id"]) for token in document.get("added_tokens", []))
    )


def _utf8_error(
    raw: bytes, *, truncated_start: bool = False, truncated_end: bool = False
) -> str | None:
    """Why the bytes are not UTF-8; a truncated chunk may start or end within a character."""
    if 0 in raw:
        return f"a NUL byte at offset {raw.index(0)}" + (
            " of its last megabyte" if truncated_start else ""
        )
    start = 0
    while truncated_start and start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1
    try:
        raw[start:].decode()
    except UnicodeDecodeError as error:
        if (
            truncated_end
            and error.start + start >= len(raw) - 3
            and error.reason == "unexpected end of data"
        ):
            return None
        suffix = " of its last megabyte" if truncated_start else ""
        return f"byte 0x{raw[start + error.start]:02x} at offset {start + error.start}{suffix}"
    return None


def _jsonl_problems(field: str, path: str, first: bytes) -> list[Problem]:
    line, newline, _ = first.partition(b"\n")
    if not newline and len(first) == _CHECKED_BYTES:
        return []  # one very long line, checked by its reader
    try:
        json.loads(line)
    except ValueError as error:
        return [
            _problem(
                field, f"the first line of {path} is not JSON: {error}", "one JSON object per line"
            )
        ]
    return []


def _problem(field: str, message: str, hint: str) -> Problem:
    return Problem(field=field, message=message, hint=hint)
