"""What an operation contributes to a run on a GPU: checks of correctness and benchmarks against
peers.

A module `kernels/gpu/<op>.py` holds them in `CASES`. Knows no operation and no clock.
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
    """One result held against the exact one: largest error, and how much was allowed."""

    what: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # NaN is not


@dataclass(frozen=True)
class Check:
    """A check of correctness: `run(device)` gives what it compared. Raising fails it too."""

    op: str
    case: str
    run: Callable[[torch.device], list[Compared]]


@dataclass(frozen=True)
class Work:
    """What a benchmark times: our call, the peers' (made when their turn comes), and what the work
    amounts to.

    `bytes` and `flops` are the least that the operation must move and compute, `bound` the roof
    that it lives under:
    memory, L2, shared memory, tensor cores in 16 bits or in fp8. A peer that cannot be made raises,
    and is told as skipped. `reads`: it writes little beside what it reads, which the timing takes
    into account.
    """

    ours: Call
    peers: dict[str, Callable[[], Call]]
    bytes: int
    flops: int
    bound: Bound
    reads: bool = False


@dataclass(frozen=True)
class Bench:
    """A benchmark; `goal` names a row of `goals.GOALS` that it decides, if any.

    Smaller `rank` runs earlier.
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
    """Our largest error against `exact` (fp64), allowed `factor` times that of `plain` torch at the
    same dtype.

    `floor` is added relative to the largest exact value: plain torch may be exact by luck. A NaN or
    infinity
    where `exact` has none is an infinite error; so is a missing one.
    """
    if tuple(ours.shape) != tuple(exact.shape):
        return Compared(
            f"{what}: shape {tuple(ours.shape)} for {tuple(exact.shape)}", float("inf"), 0.0
        )
    if exact.numel() == 0:
        return Compared(what, 0.0, 0.0)
    got, want, usual = ours.detach().double(), exact.detach().double(), plain.detach().double()
    sound = want.isfinite()
    if not torch.equal(sound, got.isfinite()) or not torch.equal(
        got[~sound].isnan(), want[~sound].isnan()
    ):
        return Compared(
            f"{what}: not finite where it should be, or the other way round", float("inf"), 0.0
        )
    if not bool(sound.any()):
        return Compared(what, 0.0, 0.0)
    error = (got - want)[sound].abs().max().item()
    allowed = (
        factor * (usual - want)[sound].abs().max().item() + floor * want[sound].abs().max().item()
    )
    return Compared(what, error, allowed)
