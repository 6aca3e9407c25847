"""The submission of a spec file, and of options that set its fields. Reads no server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from orrery_cli.errors import USAGE, CliError

SEQ_LEN = 128  # of a training run without one; within every preset's maximum


def read_document(source: str) -> dict[str, Any]:
    """The JSON object in a file, or of standard input (`-`). Raises CliError."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CliError(f"cannot read {source}: {reason}", code=USAGE) from None
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CliError(
            f"{source} is not JSON: {error}",
            "Write JSON as in examples/train.json.",
            code=USAGE,
        ) from None
    if not isinstance(document, dict):
        raise CliError(
            f"{source} is not a JSON object",
            'Write an object such as {"kind": "train", …}.',
            code=USAGE,
        )
    return document


def split_submission(document: dict[str, Any]) -> dict[str, Any]:
    """`{name?, experiment?, spec}` of a document that is one, or is the spec alone."""
    if isinstance(document.get("spec"), dict):
        return document
    return {"spec": document}


def set_field(spec: dict[str, Any], assignment: str) -> None:
    """Apply `train.optimizer.lr=0.001`: the value is JSON, or else text. Raises CliError."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise CliError(
            f"--set {assignment!r} has no value",
            "Write FIELD=VALUE, as train.steps=100.",
            code=USAGE,
        )
    put(spec, path, parse_value(text))


def parse_value(text: str) -> Any:
    """JSON, or else the text itself: `3`, `true`, `[1, 2]`, `bf16`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def put(spec: dict[str, Any], path: str, value: Any) -> None:
    """Set a field by its path; creates missing objects. Raises CliError if a part is no object."""
    *parents, last = path.split(".")
    place = spec
    for name in parents:
        child = place.get(name)
        if not isinstance(child, dict):
            if child is not None and child != "auto":
                raise CliError(f"{name} of {path} is {child!r}, not an object", code=USAGE)
            child = place[name] = {}
        place = child
    place[last] = value


def training_defaults(spec: dict[str, Any]) -> None:
    """Complete a training run that options describe: kind, length of sequences, plan."""
    spec.setdefault("kind", "train")
    if spec["kind"] != "train":
        return
    train = spec.setdefault("train", {})
    if not isinstance(train, dict):
        return
    train.setdefault("seq_len", SEQ_LEN)
    if (spec.get("resources") or {}).get("devices", 1) > 1:
        spec.setdefault("plan", "auto")
