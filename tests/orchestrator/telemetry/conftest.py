"""An external run and a factory of its points."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from tests import factories
from workers.contracts.wire.points import PointBatch


@pytest.fixture
def run(owner: User) -> Run:
    """An external run."""
    return factories.external_run(owner)


@pytest.fixture
def batch(run: Run) -> Callable[..., PointBatch]:
    """`batch_of` for the fixture's run."""
    return lambda seqs, **more: batch_of(run, seqs, **more)


def batch_of(
    run: Run,
    seqs: Iterable[int],
    *,
    rank: int = 0,
    attempt: int = 1,
    steps: Iterable[int] | None = None,
    **values: Callable[[int], float | None],
) -> PointBatch:
    """Points with these numbers; a metric is a function of the step.

    Tokens are 100 a step, time 1000 s + the step.
    """
    seqs = list(seqs)
    at = list(seqs if steps is None else steps)
    values = values or {"loss": float}
    return PointBatch(
        run=str(run.pk),
        attempt=attempt,
        rank=rank,
        seq=seqs,
        step=at,
        tokens=[step * 100 for step in at],
        time=[1000.0 + step for step in at],
        values={name: [value(step) for step in at] for name, value in values.items()},
    )
