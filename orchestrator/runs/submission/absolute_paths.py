"""Makes the relative paths of a spec absolute, and names the fields that hold models.

Does not check paths (`data_paths`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.contracts.specs.data import data_set_in_text

# where a spec may hold a ModelSource
MODEL_FIELDS = (
    ("model",),
    ("train", "init_from"),
    ("train", "dpo", "reference"),
    ("train", "distill", "teacher"),
    ("train", "ppo", "reward_model"),
    ("train", "ppo", "value", "init_from"),
    ("generate", "draft"),
    ("serve", "draft"),
    ("evaluate", "baseline"),
)
_FILE_FIELDS = (
    ("generate", "input"),
    ("produce", "seeds"),
    ("evaluate", "input"),
    ("evaluate", "references"),
    ("train", "evaluate", "input"),
    ("train", "evaluate", "references"),
    ("script", "workdir"),
)


def with_absolute_paths(
    spec: dict[str, Any], *, data_roots: Sequence[Path], models_root: Path | None = None
) -> dict[str, Any]:
    """The spec with relative paths made absolute: under the first root that has them, or the first.

    Models may also be below `models_root` and the folder that contains it, such as
    `smollm2-135m-instruct` and `runs/12/checkpoints`. A relative `generate.output` stays relative:
    it is in the run's own folder.
    """
    if not data_roots:
        return spec
    resolved = dict(spec)
    for names in _FILE_FIELDS:
        resolved = _with_absolute(resolved, names, data_roots)
    roots = [*data_roots, *([models_root, models_root.parent] if models_root else [])]
    for place in MODEL_FIELDS:
        resolved = _with_absolute(resolved, (*place, "path"), roots)
    resolved = _with_absolute_adapters(resolved, roots)
    resolved = _with_absolute_data(resolved, data_roots)
    resolved = _with_absolute_rewards(resolved, roots)
    train = resolved.get("train")
    if isinstance(train, dict) and isinstance(train.get("eval"), dict):
        resolved["train"] = {**train, "eval": _with_absolute_data(train["eval"], data_roots)}
    return resolved


def absolute_path(path: str, roots: Sequence[Path]) -> Path:
    """The path under the first root that has it, or else under the first.

    A home of an unknown user stays as it is written, and no root has a path that is too long.
    """
    expanded = Path(os.path.expanduser(path))
    if expanded.is_absolute():
        return expanded
    candidates = [root / expanded for root in roots]
    return next((path for path in candidates if os.path.exists(path)), candidates[0])


def _with_absolute(
    body: dict[str, Any], names: tuple[str, ...], roots: Sequence[Path]
) -> dict[str, Any]:
    """The body whose text at `names`, if it has one, is an absolute path."""
    first, *rest = names
    value = body.get(first)
    if rest and isinstance(value, dict):
        return {**body, first: _with_absolute(value, tuple(rest), roots)}
    if not rest and isinstance(value, str) and data_set_in_text(value) is None:
        return {**body, first: str(absolute_path(value, roots))}
    return body


def _with_absolute_adapters(body: dict[str, Any], roots: Sequence[Path]) -> dict[str, Any]:
    serve = body.get("serve")
    adapters = serve.get("adapters") if isinstance(serve, dict) else None
    if not isinstance(serve, dict) or not isinstance(adapters, dict):
        return body
    paths = {
        name: str(absolute_path(path, roots)) if isinstance(path, str) else path
        for name, path in adapters.items()
    }
    return {**body, "serve": {**serve, "adapters": paths}}


def _with_absolute_rewards(spec: dict[str, Any], roots: Sequence[Path]) -> dict[str, Any]:
    """The spec whose rewards have absolute paths."""
    train = spec.get("train")
    if not isinstance(train, dict):
        return spec
    field = "ppo" if isinstance(train.get("ppo"), dict) else "grpo"
    policy = train.get(field)
    if not isinstance(policy, dict) or not isinstance(policy.get("rewards"), list):
        return spec
    absolute = [
        {**each, "path": str(absolute_path(each["path"], roots))}
        if isinstance(each, dict) and isinstance(each.get("path"), str)
        else each
        for each in policy["rewards"]
    ]
    return {
        **spec,
        "train": {**train, field: {**policy, "rewards": absolute}},
    }


def _with_absolute_data(body: dict[str, Any], roots: Sequence[Path]) -> dict[str, Any]:
    data = body.get("data")
    if not isinstance(data, dict):
        return body
    resolved = dict(data)
    for name in ("path", "tokenizer"):
        value = resolved.get(name)
        if isinstance(value, str) and (name, value) != ("tokenizer", "bytes"):
            resolved[name] = str(absolute_path(value, roots))
    if isinstance(resolved.get("sources"), list):
        resolved["sources"] = [
            {**source, "path": str(absolute_path(source["path"], roots))}
            if isinstance(source, dict) and isinstance(source.get("path"), str)
            else source
            for source in resolved["sources"]
        ]
    return {**body, "data": resolved}
