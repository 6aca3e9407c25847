"""Pools of ranks, one per world size, and the small runs that the tests are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.workers.training.pool import Pool, Result, train_alone
from workers.models.weights.manifest import step_folder
from workers.models.weights.orrery_checkpoint import CheckpointFolder
from workers.models.weights.parameter_shapes import weight_shapes

TINY = {
    "name": "tiny",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 256,
    "max_seq_len": 64,
}


def make_spec(
    model: Any = None, plan: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    """A short run of a tiny decoder on Shakespeare without samples; keywords change `train`."""
    defaults = {
        "steps": 4,
        "seq_len": 16,
        "seed": 3,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "samples": {"count": 0},
    }
    return {
        "kind": "train",
        "model": model if isinstance(model, str) else dict(model or TINY),
        "plan": plan or {},
        "train": {**defaults, **train},
    }


def final_weights(result: Result, step: int) -> dict[str, Tensor]:
    """The weights in a run's checkpoint of `step`, whole, by name."""
    results = CheckpointFolder(result.directory / "checkpoints" / step_folder(step))
    return {name: results.read(name) for name in weight_shapes(results.spec)}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


# no longer: each of gloo's groups wakes up 100 times a second, used or not
@pytest.fixture(scope="package")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    started: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        # a test that lost a rank is to be the only one that fails
        if size in started and not started[size].whole:
            started.pop(size).close()
        if size not in started:
            started[size] = Pool(size, tmp_path_factory.mktemp("pool") / "store")
        return started[size]

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture(scope="package")
def train(pools: Callable[[int], Pool]) -> Callable[..., Result]:
    """`train(spec, directory)`: in this process, or on as many as the plan wants."""

    def run(spec: dict[str, Any], directory: Path, **more: str) -> Result:
        ranks = math.prod(spec["plan"].get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
        return (
            train_alone(spec, directory, **more)
            if ranks == 1
            else pools(ranks).train(spec, directory, **more)
        )

    return run
