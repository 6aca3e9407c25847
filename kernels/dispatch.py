"""Chooses and records the implementation that runs a call, with the reason.

Order: the forced backend (argument, then KERNELS_BACKEND), else the tuned table's order, else the
operation's order; the first candidate that can run. Does not depend on any operation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels import tuning
from kernels.runtime import INTERPRET

KNOWN_BACKENDS = ("own", "torch", "reference", "cudnn", "flash", "efficient", "math", "compiled")
"""Every backend that an operation may offer; other forced names raise ValueError."""

MAX_RECORDS = 1024
"""Distinct (operation, facts, backend) records; later ones are counted together under facts {}."""

MAX_CACHED = 4096
"""Cached choices by exact call key; all are dropped when there are more."""


class BackendUnavailable(RuntimeError):
    """The requested backend, or every backend, cannot run this call; the message says why.

    A retry does not help.
    """


@dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation of an operation: its backend's name, and why it cannot run this call (None
    if it can).
    """

    backend: str
    why_not: str | None = None


@dataclass(slots=True)
class _Record:
    facts: dict[str, object]
    reason: str
    calls: int = 0


_records: dict[tuple[object, ...], _Record] = {}
_cached: dict[tuple[object, ...], tuple[Any, _Record]] = {}
_variables: dict[bytes, bytes] = getattr(os.environ, "_data", {})
forced_by_environment = (  # 0.05 us; os.environ itself takes 0.5 us
    _variables.get if b"PATH" in _variables else lambda name: os.environ.get(name.decode())
)
_latest = threading.local()  # the record that this thread counted last
_lock = threading.Lock()


def choose(
    op: str, facts: dict[str, object], candidates: Sequence[Candidate], backend: str | None = None
) -> Candidate:
    """Returns the candidate to run.

    `candidates` are in the operation's own order. `facts` are what the choice may depend on (dtype,
    sizes rounded by `tuning.round_up`, flags), with few distinct values. `backend` forces one by
    name. Raises BackendUnavailable if the forced one, or every candidate, cannot run; ValueError
    for an unknown name.
    """
    forced, by = (backend, "backend=") if backend is not None else _forced(op)
    if forced is not None:
        chosen, reason = _select_forced(op, forced, by, candidates)
        if chosen is not None:
            _record(op, facts, chosen.backend, reason)
            return chosen
    order = [] if torch.compiler.is_compiling() else tuning.order(op, facts)
    ranked = sorted(
        candidates, key=lambda c: order.index(c.backend) if c.backend in order else len(order)
    )
    skipped: list[str] = []
    for candidate in ranked:
        if candidate.why_not is None:
            first = (
                "first in the tuned order"
                if candidate.backend in order
                else "first in the default order"
            )
            reason = "; ".join(skipped) if skipped else first
            _record(op, facts, candidate.backend, reason)
            return candidate
        skipped.append(f"not {candidate.backend}: {candidate.why_not}")
    raise BackendUnavailable(f"{op}: no backend can run this call: {'; '.join(skipped)}.")


def explain() -> list[dict[str, object]]:
    """Each kind of call since the start: {op, facts, backend, reason, calls}, in the order of first
    use.

    Facts are numbers, strings and None, fit for JSON. A call traced by torch.compile counts once.
    """
    with _lock:
        return [
            {
                "op": key[0],
                "facts": {k: _plain(v) for k, v in r.facts.items()},
                "backend": key[1],
                "reason": r.reason,
                "calls": r.calls,
            }
            for key, r in _records.items()
        ]


def clear_records() -> None:
    """Clears the records of `explain` and the cached choices, for the start of a run."""
    with _lock:
        _records.clear()
        _cached.clear()


def cached_choice(key: tuple[object, ...] | None) -> Any:
    """The cached value for calls with this key, after counting the call; None if nothing is
    cached.
    """
    hit = _cached.get(key) if key is not None else None
    if hit is None:
        return None
    hit[1].calls += 1
    return hit[0]


def cache_choice(key: tuple[object, ...] | None, value: Any) -> None:
    """Caches `value` for all calls with this key, right after the `choose` that it depends on.

    `key` contains everything that checks and choice depend on; None caches nothing.
    """
    if key is not None:
        if len(_cached) >= MAX_CACHED:
            _cached.clear()
        _cached[key] = value, _latest.record


def call_key(
    op: str, tensors: Sequence[torch.Tensor | None], *options: object, strides: bool = False
) -> tuple[object, ...] | None:
    """Cache key of a call: all that checks and choice may depend on; None if it cannot be cached.

    Strides of CPU tensors matter only if kernels are interpreted, or with `strides`. Costs 2 to
    5 us. Checking and choosing again costs 10 to 100 us; torch's smallest operators take 3 us.
    """
    if torch.compiler.is_compiling():
        return None
    key: list[object] = [op, forced_by_environment(b"KERNELS_BACKEND"), torch.is_grad_enabled()]
    for x in tensors:
        if x is None:
            key.append(None)
        elif not isinstance(x, torch.Tensor):
            return None
        elif x.is_cpu and not INTERPRET and not strides:
            key += (x.shape, x.dtype, x.layout, x.requires_grad, type(x))
        elif x.layout is torch.strided:
            key += (x.shape, x.dtype, x.stride(), x.device, x.requires_grad, type(x))
        else:
            return None
    for option in options:
        if option is not None and not isinstance(option, (int, float, str)):
            return None
        key += (option, type(option))
    return tuple(key)


def record_choice(op: str, facts: dict[str, object], backend: str, reason: str) -> None:
    """Records for `explain` a call whose backend was chosen elsewhere, not by `choose`."""
    _record(op, facts, backend, reason)


def _forced(op: str) -> tuple[str | None, str]:
    """KERNELS_BACKEND: "own" for all operations, or "attention=cudnn,rms_norm=own" for some."""
    text = os.environ.get("KERNELS_BACKEND", "").strip()
    if not text:
        return None, ""
    everywhere: str | None = None
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        if value not in KNOWN_BACKENDS:
            raise ValueError(
                f"KERNELS_BACKEND names {value!r}; it must be one of: {', '.join(KNOWN_BACKENDS)}."
            )
        if name == op:
            return value, f"KERNELS_BACKEND={op}="
        if not name:
            everywhere = value
    return everywhere, "KERNELS_BACKEND="


def _select_forced(
    op: str, forced: str, by: str, candidates: Sequence[Candidate]
) -> tuple[Candidate | None, str]:
    for candidate in candidates:
        if candidate.backend == forced:
            if candidate.why_not is not None:
                raise BackendUnavailable(
                    f"{op}: {by}{forced} was requested and cannot run this call: "
                    f"{candidate.why_not}. "
                    "Remove the request, or change the call."
                )
            return candidate, f"requested by {by}{forced}"
    # A request for all operations does not apply to operations that lack the backend.
    if by == "KERNELS_BACKEND=":
        return None, ""
    names = ", ".join(c.backend for c in candidates)
    raise ValueError(f"{op}: {by}{forced} was requested; available backends: {names}.")


def _record(op: str, facts: dict[str, object], backend: str, reason: str) -> None:
    if torch.compiler.is_compiling():
        _traced(op, tuple((k, _plain(v)) for k, v in facts.items()), backend, reason)
        return
    _count((op, backend, *facts.items()), facts, reason)


def _traced(op: str, facts: tuple[tuple[str, object], ...], backend: str, reason: str) -> None:
    """Runs once when torch.compile traces a call; the call stays in the graph and is not counted
    again.
    """
    _count((op, backend, *facts), dict(facts), f"{reason}; traced by torch.compile")


# what torch.compiler.assume_constant_result sets, without importing the compiler
_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plain(value: object) -> object:
    return (
        str(value).removeprefix("torch.")
        if isinstance(value, (torch.dtype, torch.device))
        else value
    )


def _count(key: tuple[object, ...], facts: dict[str, object], reason: str) -> None:
    record = _records.get(key)
    if record is None:
        with _lock:
            if len(_records) >= MAX_RECORDS and key not in _records:
                key, facts, reason = (
                    (key[0], key[1]),
                    {},
                    "further kinds of calls, counted together",
                )
            record = _records.setdefault(key, _Record(dict(facts), reason))
    record.calls += 1
    _latest.record = record
