"""Previews files of fine-tuning data by a process of the worker package, with limits.

Only files under the allowed data folders are read. Does not import tokenizers or templates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.conf import settings
from pydantic import ValidationError

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs.submission.data_paths import file_problems, resolve_path
from orchestrator.runs.submission.weights import models_root
from workers.contracts.base import validation_problems
from workers.contracts.examples.preview import PreviewRequest

_COMMAND = [sys.executable, "-m", "workers.training.data.examples.preview"]
_TIMEOUT_S = 40
_LARGEST_ANSWER = 16 << 20
_MOST_FILES = 200
_DEPTH = 3
_ROOT = Path(__file__).resolve().parents[4]
_running = threading.BoundedSemaphore(2)


def example_files() -> list[str]:
    """Files of JSON lines under the data folders, at most _MOST_FILES, by name."""
    names: list[str] = []
    for root in settings.DATA_ROOTS:
        for folder, folders, files in os.walk(root):
            depth = len(Path(folder).relative_to(root).parts)
            folders[:] = sorted(each for each in folders if depth < _DEPTH and each[0] != ".")
            names += [
                str(Path(folder, name).relative_to(root))
                for name in sorted(files)
                if name.endswith(".jsonl")
            ]
            if len(names) >= _MOST_FILES:
                return names[:_MOST_FILES]
    return names


def example_preview(request: Mapping[str, Any]) -> dict[str, Any]:
    """The preview of a file (`workers.training.data.examples.preview`).

    Raises Refusal 422 for a request, file or tokenizer that cannot be used, 503 if two previews
    are in progress.
    """
    return preview_of_checked_paths(_absolute_paths(_parse(request)))


def preview_of_checked_paths(parsed: PreviewRequest) -> dict[str, Any]:
    """As `example_preview`, of absolute paths that this user may read.

    Raises 503 while two previews are in progress, 422 for one that takes too long.
    """
    if not _running.acquire(timeout=5):
        raise Refusal("busy", "Try again", 503, "Two previews are in progress.", retry_after_s=5)
    try:
        done = subprocess.run(
            _COMMAND,
            input=parsed.to_json().encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            cwd=_ROOT,
            env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise invalid(
            "path", f"took longer than {_TIMEOUT_S} s", "Use fewer lines, or a simpler template."
        ) from None
    finally:
        _running.release()
    if done.returncode != 0 or len(done.stdout) > _LARGEST_ANSWER:
        raise _failed(done)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer | {"path": parsed.path}


def _parse(request: Mapping[str, Any]) -> PreviewRequest:
    try:
        return PreviewRequest.from_dict(request)
    except ValidationError as error:
        problems = validation_problems(error)
        raise Refusal(
            "invalid", "The request is not valid", 422, str(problems[0]), problems
        ) from None


def _absolute_paths(request: PreviewRequest) -> PreviewRequest:
    """The request with resolved paths. Raises Refusal for paths outside the allowed folders."""
    roots = settings.DATA_ROOTS
    resolved, problems = resolve_path("path", request.path, roots)
    problems = problems or file_problems("path", request.path, request.format or "messages", roots)
    changed: dict[str, Any] = {"path": str(resolved)}
    if request.tokenizer is not None and not problems:
        tokenizer, problems = resolve_path("tokenizer", request.tokenizer, [*roots, models_root()])
        changed["tokenizer"] = str(tokenizer)
    if problems:
        raise Refusal("invalid", "The request is not valid", 422, str(problems[0]), problems)
    return request.model_copy(update=changed)


def _failed(done: subprocess.CompletedProcess[bytes]) -> Refusal:
    if done.returncode == 64:
        text = done.stderr.decode(errors="replace").strip()
        field, _, message = text.partition(": ")
        return invalid(field.removeprefix("data.") or "path", message or text)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [
        f"the preview ended with code {done.returncode}"
    ]
    return Refusal("preview-failed", "The preview failed", 500, lines[-1][:500])
