"""Checks the paths of a spec: under the allowed roots after symlinks, existing, and valid text.

Reads only the first and last megabyte of a text file, on the control plane's own disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.runs.submission.absolute_paths import MODEL_FIELDS, absolute_path
from orchestrator.runs.submission.examples.example_lines import (
    example_problems,
    prompt_problems,
    seed_problems,
)
from workers.contracts import ModelSource, Problem, RunSpec
from workers.contracts.examples.shapes import needed_shape
from workers.contracts.specs.data import EXAMPLE_FORMATS, SUFFIXES, DataSpec
from workers.contracts.specs.finetuning.reinforcement_checks import policy_field
from workers.contracts.specs.finetuning.rewards import ModelReward, PythonReward
from workers.contracts.specs.script import UV_LOCK, ScriptBody

_CHECKED_BYTES = 2**20
_CHECKED_FILES = 20  # per folder
_LARGEST_TOKENIZER_BYTES = 2**26


def path_problems(
    spec: RunSpec,
    *,
    data_roots: Sequence[Path],
    run_root: Path,
    models_root: Path | None = None,
    elsewhere: Collection[str] = (),
    texts: Mapping[str, str] = MappingProxyType({}),
) -> list[Problem]:
    """Problems with the paths of a spec.

    Weights and tokenizers may also be under `run_root` (checkpoints), and weights under
    `models_root` (downloads). Registered data sets may be a run's output; those `elsewhere` are not
    on this machine. `texts`: their paths by the texts that name them in place of a path.
    """
    problems: list[Problem] = []
    for field, path, format, registered in _data_files(spec, texts):
        if registered and path in elsewhere:
            continue
        roots = [*data_roots, run_root] if registered else data_roots
        of_file = file_problems(field, path, format, roots)
        problems += of_file or _example_problems(spec, field, path, format, roots)
        if not of_file and spec.produce is not None and field == "produce.seeds":
            resolved = resolve_path(field, path, roots)[0]
            needed = spec.produce.needs_answers
            problems += seed_problems(field, resolved, needs_answer=needed) if resolved else []
    for field, path in _tokenizers(spec):
        problems += _tokenizer_problems(
            field, path, spec.shape.vocab if spec.shape else None, [*data_roots, run_root]
        )
    for field, path in _models(spec):
        problems += resolve_path(
            field, path, [*data_roots, run_root, *([models_root] if models_root else [])]
        )[1]
    policy = spec.train.policy if spec.train else None
    if policy is not None:
        for number, reward in enumerate(policy.rewards):
            if isinstance(reward, ModelReward) and reward.path is not None:
                field = f"train.{policy_field(policy)}.rewards.{number}.path"
                roots = [*data_roots, run_root, *([models_root] if models_root else [])]
                problems += resolve_path(field, reward.path, roots)[1]
    if spec.generate:
        problems += _output_problems("generate.output", spec.generate.output, data_roots)
    if spec.produce:
        problems += _output_problems("produce.output", spec.produce.output, data_roots)
    if spec.script and spec.script.workdir is not None:
        resolved, path_problems_ = resolve_path("script.workdir", spec.script.workdir, data_roots)
        problems += path_problems_
        if resolved is not None and not resolved.is_dir():
            message = f"{spec.script.workdir} is not a folder"
            problems.append(_problem("script.workdir", message, "Use the folder of the program."))
        elif resolved is not None:
            problems += _lock_problems(spec.script, resolved)
    return problems


def _lock_problems(script: ScriptBody, folder: Path) -> list[Problem]:
    """Whether the lock file that a script names is in its work folder."""
    lock = script.environment.lock if script.environment else None
    if lock is None:
        return []
    field, file = "script.environment.lock", folder / lock
    try:
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
            return [
                _problem(
                    field,
                    f"there is no file {lock} in the work folder",
                    "Use a file such as uv.lock.",
                )
            ]
        if file.name == UV_LOCK and not file.with_name("pyproject.toml").is_file():
            message = f"there is no pyproject.toml next to {lock}"
            return [_problem(field, message, "Use the project's folder as script.workdir.")]
    except OSError as error:
        return [_problem(field, f"{lock} cannot be read: {error.strerror}", "Use another file.")]
    return []


def _data_files(spec: RunSpec, texts: Mapping[str, str]) -> Iterator[tuple[str, str, str, bool]]:
    """`(field, path, format, registered)` of all data files; `registered`: of a data set."""
    for field, data in _data_specs(spec):
        for source_field, source in data.parts(field):
            if source.path is not None:
                registered = source.dataset is not None
                yield f"{source_field}.path", source.path, source.format, registered
    for field, path, format in _other_files(spec):
        yield field, texts.get(path, path), format, path in texts


def _other_files(spec: RunSpec) -> Iterator[tuple[str, str, str]]:
    """Files that are not training data."""
    if spec.generate:
        yield "generate.input", spec.generate.input, "jsonl"
    if spec.produce:
        if spec.produce.seeds is not None:
            yield "produce.seeds", spec.produce.seeds, "text"
        for number, each in enumerate(spec.produce.filters):
            if each.against is not None:
                yield f"produce.filters.{number}.against", each.against, "any"
    policy = spec.train.policy if spec.train else None
    if policy is not None:
        for number, reward in enumerate(policy.rewards):
            if isinstance(reward, PythonReward):
                yield f"train.{policy_field(policy)}.rewards.{number}.path", reward.path, "any"
    after = spec.train.evaluate if spec.train else None
    for field, body in (("evaluate", spec.evaluate), ("train.evaluate", after)):
        for name in ("input", "references"):
            path = getattr(body, name, None)
            if path is not None:
                yield f"{field}.{name}", path, "any"


def _data_specs(spec: RunSpec) -> Iterator[tuple[str, DataSpec]]:
    yield "data", spec.data
    if spec.train and spec.train.eval and spec.train.eval.data:
        yield "train.eval.data", spec.train.eval.data


def _tokenizers(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for field, data in _data_specs(spec):
        if isinstance(data.tokenizer, str) and data.tokenizer != "bytes":
            yield f"{field}.tokenizer", data.tokenizer


def _models(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for names in MODEL_FIELDS:
        source: Any = spec
        for name in names:
            source = getattr(source, name, None)
        if isinstance(source, ModelSource) and source.path is not None:
            yield ".".join((*names, "path")), source.path
    if spec.serve is not None:
        for name, path in spec.serve.adapters.items():
            yield f"serve.adapters.{name}", path


def resolve_path(field: str, path: str, roots: Sequence[Path]) -> tuple[Path | None, list[Problem]]:
    """`(resolved path, [])`, or None and the problem.

    Paths outside the roots give the same problem whether they exist or not.
    """
    allowed = ", ".join(str(root) for root in roots)
    if "\0" in path:
        return None, [
            _problem(field, "the path contains a NUL character", "Use a path without it.")
        ]
    absolute = absolute_path(path, roots)
    resolved = Path(os.path.realpath(absolute))
    if not any(resolved.is_relative_to(os.path.realpath(root)) for root in roots):
        return None, [
            _problem(
                field, f"{path} is not under the allowed folders", f"Use a path under {allowed}."
            )
        ]
    if not os.path.exists(resolved):
        return None, [
            _problem(field, f"{path} does not exist", f"Use an existing file under {allowed}.")
        ]
    return resolved, []


def _output_problems(field: str, path: str, roots: Sequence[Path]) -> list[Problem]:
    if not os.path.isabs(os.path.expanduser(path)):
        if not path.strip() or ".." in Path(path).parts or Path(path).name in ("", "."):
            return [
                _problem(
                    field,
                    f"{path!r} is not a file name in the run's folder",
                    "Use a file name such as answers.jsonl.",
                )
            ]
        return []
    folder = os.path.dirname(path) or "."
    return resolve_path(field, folder, roots)[1]


def file_problems(field: str, path: str, format: str, roots: Sequence[Path]) -> list[Problem]:
    """What is wrong with a data file, or a folder of them: place, size, encoding, first line."""
    resolved, problems = resolve_path(field, path, roots)
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
            return [
                _problem(field, message, f"Use a {format} file, or a folder with {format} files.")
            ]
        return [
            item
            for file in files[:_CHECKED_FILES]
            for item in file_problems(field, str(file), format, roots)
        ][:1]
    if not resolved.is_file():
        return [_problem(field, f"{path} is not a file", "Use one file.")]
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
                "Give Orrery's user read permission.",
            )
        ]
    if not size:
        return [_problem(field, f"{path} is empty", "Use a file with content.")]
    if format not in ("text", "jsonl", *EXAMPLE_FORMATS):
        return []
    complete = size <= _CHECKED_BYTES
    encoding_error = _utf8_error(first, truncated_end=not complete) or (
        None if complete else _utf8_error(last, truncated_start=True)
    )
    if encoding_error:
        return [
            _problem(
                field,
                f"{path} is not UTF-8 text: {encoding_error}",
                "Convert the file with iconv -t UTF-8.",
            )
        ]
    return _jsonl_problems(field, path, first) if format == "jsonl" else []


def _example_problems(
    spec: RunSpec, field: str, path: str, format: str, roots: Sequence[Path]
) -> list[Problem]:
    """What an objective cannot train on, in the first lines of a file of examples."""
    shape = needed_shape(spec.train) if spec.train is not None else None
    policy = spec.train.policy if spec.train is not None else None
    resolved, _ = resolve_path(field, path, roots)
    if (shape is None and policy is None) or resolved is None or format not in EXAMPLE_FORMATS:
        return []
    names = SUFFIXES[format]
    files = (
        sorted(each for each in resolved.iterdir() if each.suffix in names and each.is_file())
        if resolved.is_dir()
        else [resolved]
    )
    if policy is not None:
        return prompt_problems(field, files, needs_answer=policy.needs_answer)
    assert shape is not None
    return example_problems(field, files, format, shape)


def _tokenizer_problems(
    field: str, path: str, vocab: int | None, roots: Sequence[Path]
) -> list[Problem]:
    """Problems of a tokenizer.json, or a folder with one; its ids must be within the vocabulary."""
    resolved, problems = resolve_path(field, path, roots)
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
                "Use a tokenizer.json, or a folder with one.",
            )
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [
            _problem(
                field,
                f"{path} is not a tokenizer.json: {error}",
                "Use a tokenizer.json of Hugging Face.",
            )
        ]
    if vocab is not None and largest >= vocab:
        message = f"{path} has token ids up to {largest}, the model's vocabulary has {vocab}"
        return [
            _problem(
                field, message, f"Use the tokenizer of this model, or vocab {largest + 1} or more."
            )
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
                field,
                f"the first line of {path} is not JSON: {error}",
                "Use one JSON object per line.",
            )
        ]
    return []


def _problem(field: str, message: str, hint: str) -> Problem:
    return Problem(field=field, message=message, hint=hint)
