"""Types of GPU cases: correctness checks and benchmarks against peers.

A module `kernels/gpu/<op>.py` lists its cases in `CASES`. Does not depend on any operation or
clock.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

Bound = Literal["hbm", "l2", "smem", "tensor", "fp8"]
Call = Callable[[], object]


@dataclass(frozen=True)
class Compared:
    """One result compared with the exact one: largest error, and allowed error."""

    what: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed  # false for NaN


@dataclass(frozen=True)
class Check:
    """A correctness check: `run(device)` returns its comparisons. An exception also fails it."""

    op: str
    case: str
    run: Callable[[torch.device], list[Compared]]


@dataclass(frozen=True)
class Work:
    """The calls of a benchmark: ours, the peers' (created when timed), and the amount of work.

    `bytes` and `flops` are the minimum that the operation must move and compute; `bound` is its
    limiting resource: memory, L2, shared memory, tensor cores in 16 bits or in fp8. A peer that
    cannot be created raises, and is reported as skipped. `reads`: it writes little compared with
    what it reads, which affects the timing.
    """

    ours: Call
    peers: dict[str, Callable[[], Call]]
    bytes: int
    flops: int
    bound: Bound
    reads: bool = False


@dataclass(frozen=True)
class Bench:
    """A benchmark; `goal` names the row of `goals.GOALS` that it decides, if any. Smaller `rank`
    runs earlier.
    """

    op: str
    case: str
    make: Callable[[torch.device], Work]
    goal: str | None = None
    rank: int = 5
    backend: str = field(default="own")


Cases = list[Check | Bench]


def cases(only: str | None = None, source: str = "kernels.gpu") -> tuple[list[Check], list[Bench]]:
    """All checks and benchmarks of a package's modules (or of one module), benchmarks in order of
    rank.
    """
    root = importlib.import_module(source)
    names = [
        info.name for info in pkgutil.iter_modules(getattr(root, "__path__", ()), f"{source}.")
    ]
    checks: list[Check] = []
    benches: list[Bench] = []
    for name in [n for n in names if not n.endswith("__main__")] or [source]:
        for case in getattr(importlib.import_module(name), "CASES", ()):
            if only is None or case.op == only:
                (checks if isinstance(case, Check) else benches).append(case)
    return checks, sorted(benches, key=lambda b: b.rank)


def compare(
    what: str,
    ours: torch.Tensor,
    exact: torch.Tensor,
    plain: torch.Tensor,
    factor: float = 2.0,
    floor: float = 1e-6,
) -> Compared:
    """Our largest error against `exact` (fp64); allowed is `factor` times that of `plain` torch at
    the same dtype.

    `floor` is added relative to the largest exact value, because plain torch may be exact by
    chance. A NaN or infinity where `exact` has none is an infinite error; so is a missing one.
    """
    if tuple(ours.shape) != tuple(exact.shape):
        return Compared(
            f"{what}: shape {tuple(ours.shape)} for {tuple(exact.shape)}", float("inf"), 0.0
        )
    if exact.numel() == 0:
        return Compared(what, 0.0, 0.0)
    got, want, plain_wide = ours.detach().double(), exact.detach().double(), plain.detach().double()
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(
        got[~finite].isnan(), want[~finite].isnan()
    ):
        return Compared(
            f"{what}: finite and non-finite values differ from the exact result", float("inf"), 0.0
        )
    if not bool(finite.any()):
        return Compared(what, 0.0, 0.0)
    error = (got - want)[finite].abs().max().item()
    allowed = (
        factor * (plain_wide - want)[finite].abs().max().item()
        + floor * want[finite].abs().max().item()
    )
    return Compared(what, error, allowed)
