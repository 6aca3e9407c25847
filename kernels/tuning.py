"""Launch configurations and backend orders by architecture: measured values, else the operation's
rule.

`tables/<arch>.json` ships with the project. A user's measurements are stored in the XDG cache,
keyed by triton's version and a hash of these sources. Nothing is timed while a program runs. Does
not depend on any operation.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernels import runtime

Config = dict[str, Any]
Rule = Callable[[str, dict[str, Any]], Config]

_HERE = Path(__file__).parent
CandidateFunction = Callable[[str, dict[str, Any]], list[Config]]

_rules: dict[str, Rule] = {}
_candidates: dict[str, CandidateFunction] = {}
_recorders: list[list[tuple[str, dict[str, Any]]]] = []
_overrides: dict[str, Config] = {}
_cached: dict[tuple[object, ...], Config] = {}

MAX_CACHED_CONFIGS = 4096
"""Cached configurations by exact facts; further ones are looked up each time."""


def rule(op: str) -> Callable[[Rule], Rule]:
    """Registers a function (arch, facts) -> configuration, used by `op` if no table has a row.

    `arch` is "sm_90" or similar, or "interpret": return blocks so small that tests cross their
    edges.
    """

    def register(function: Rule) -> Rule:
        _rules[op] = function
        return function

    return register


def candidates(op: str) -> Callable[[CandidateFunction], CandidateFunction]:
    """Registers a function (arch, facts) -> changes to the rule's configuration for `make gpu` to
    measure.
    """

    def register(function: CandidateFunction) -> CandidateFunction:
        _candidates[op] = function
        return function

    return register


def candidates_for(op: str, facts: dict[str, Any]) -> list[Config]:
    """The changes to measure for these facts; empty if the operation registered none."""
    return _candidates[op](runtime.arch(), facts) if op in _candidates else []


def changes(default: Config, *choices: Config, most: int = 12) -> list[Config]:
    """What differs from `default` in each of `choices`, without repetitions, at most `most`."""
    result: list[Config] = []
    for choice in choices:
        changed = {name: value for name, value in choice.items() if default.get(name) != value}
        if changed and changed not in result:
            result.append(changed)
    return result[:most]


def combinations(**values: tuple[Any, ...]) -> list[Config]:
    """All combinations of the values by name, the last name varying fastest."""
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


@contextlib.contextmanager
def record_lookups() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Within the block, the list collects (op, facts) of each configuration lookup."""
    lookups: list[tuple[str, dict[str, Any]]] = []
    _recorders.append(lookups)
    try:
        yield lookups
    finally:
        _recorders.remove(lookups)


def config(op: str, **facts: Any) -> Config:
    """The configuration (block sizes, num_warps, num_stages, …) to launch `op` with for these
    facts.
    """
    for lookups in _recorders:
        lookups.append((op, facts))
    key = (op, *facts.items())
    chosen = _cached.get(key)
    if chosen is None:
        arch = runtime.arch()
        chosen = dict(_rules[op](arch, facts)) if op in _rules else {}
        chosen.update(_table_row(arch, op, bucket(facts)))
        if len(_cached) < MAX_CACHED_CONFIGS:
            _cached[key] = chosen
    return {**chosen, **_overrides.get(op, {})}


def order(op: str, facts: dict[str, Any]) -> list[str]:
    """Backends of `op` by measured speed for these facts; empty if nothing was measured."""
    arch = runtime.arch()
    for table in _tables(arch):
        rows = table.get("order", {}).get(op, {})
        backends = rows.get(bucket(facts), rows.get("*"))
        if backends:
            return list(backends)
    return []


@contextlib.contextmanager
def override(op: str, **values: Any) -> Iterator[None]:
    """Within the block, `op` launches with these values; for the tuner and for tests of odd block
    sizes.
    """
    before = _overrides.get(op)
    _overrides[op] = values
    try:
        yield
    finally:
        if before is None:
            del _overrides[op]
        else:
            _overrides[op] = before


def round_up(n: int) -> int:
    """n rounded up to the next power of two, its bucket; 0 stays 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def bucket(facts: dict[str, Any]) -> str:
    """The key of a table's row: names in order, integers as their bucket."""
    return " ".join(f"{k}={_bucket_value(v)}" for k, v in sorted(facts.items()))


def save(op: str, facts: dict[str, Any], values: Config) -> Path:
    """Saves a measured configuration in the user's cache; returns the file."""
    path = user_table(runtime.arch())
    table = json.loads(path.read_text()) if path.exists() else {}
    table.setdefault("configs", {}).setdefault(op, {})[bucket(facts)] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(table, indent=1, sort_keys=True))
    partial.replace(path)
    _tables.cache_clear()
    _cached.clear()
    return path


def cache_home() -> Path:
    """The directory of the files that kernels store on a user's machine."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "orrery" / "kernels"


def user_table(arch: str) -> Path:
    """The user's table: one per version of triton and of these sources."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return cache_home() / f"{arch}-triton{version}-{source_hash()}.json"


@functools.cache
def source_hash() -> str:
    """Hash of every Python file of this package."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.relative_to(_HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _bucket_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(round_up(value)) if isinstance(value, int) else str(value).removeprefix("torch.")


def _table_row(arch: str, op: str, key: str) -> Config:
    for table in _tables(arch):
        rows = table.get("configs", {}).get(op, {})
        if key in rows:
            return dict(rows[key])
    return {}


@functools.cache
def _tables(arch: str) -> tuple[dict[str, Any], ...]:
    """The user's table before the shipped one."""
    if arch in ("cpu", "interpret"):
        return ()
    paths = (user_table(arch), _HERE / "tables" / f"{arch}.json")
    return tuple(json.loads(p.read_text()) for p in paths if p.exists())
