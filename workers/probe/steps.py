"""Training steps of small models by the engine itself, on all ranks of a probe.

A step joins what single rates cannot show: launches, overlap, waiting and the update. Does not
depend on processes or the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from workers.contracts.catalog.presets import preset
from workers.metrics.beacon import Beacon
from workers.runtime.environment import Environment
from workers.training.benchmark.repeat import Repeat, Requests
from workers.training.data.run_samples import open_samples
from workers.training.parallel.mesh import World, build_axes
from workers.training.setup.spec_loading import TrainingRun, accept

WARM_UP, TIMED = 3, 8


@dataclass(frozen=True)
class Case:
    """A model and a plan for all ranks; `changes` of the plan, by data parallelism otherwise."""

    hidden: int
    layers: int
    heads: int
    micro_batch: int
    seq_len: int = 128
    vocab: int = 256
    axis: str = "dp"
    zero: int = 1
    changes: dict[str, Any] = field(default_factory=dict)


# small, by tokens and width: a probe of seconds
_SHORT = (Case(128, 5, 4, 2), Case(128, 5, 4, 6), Case(256, 2, 8, 2))
_MORE = (
    Case(128, 5, 4, 16),
    Case(256, 4, 8, 4, seq_len=256),
    Case(288, 6, 6, 2, seq_len=256, vocab=8192),
    Case(512, 2, 8, 2, seq_len=256),
    Case(256, 4, 8, 4, zero=3),
    Case(256, 4, 8, 4, axis="tp", zero=0),
    Case(256, 4, 8, 2, axis="pp", zero=0),
    Case(256, 4, 8, 4, changes={"recompute": "full"}),
    Case(128, 8, 4, 1, seq_len=512),
)
# of GPUs: enough work to fill them
_GPU = (
    Case(1024, 4, 8, 4, seq_len=2048, vocab=32000, zero=1),
    Case(2048, 4, 16, 2, seq_len=2048, vocab=32000, zero=1),
    Case(2048, 2, 16, 4, seq_len=4096, vocab=32000, zero=3),
    Case(4096, 2, 32, 1, seq_len=4096, vocab=32000, zero=1),
)


def cases(*, gpu: bool, ranks: int, short: bool) -> list[Case]:
    """The runs of a probe, the most useful first; those by other axes need several ranks."""
    chosen = _GPU[: 2 if short else None] if gpu else _SHORT + (() if short else _MORE)
    return [case for case in chosen if ranks > 1 or case.axis == "dp"]


def run_of(case: Case, *, ranks: int, gpu: bool) -> TrainingRun:
    """The case as a training run. Raises UserError if the engine refuses it."""
    model = preset("llama-tiny").model_copy(
        update={
            "hidden": case.hidden,
            "layers": case.layers,
            "heads": case.heads,
            "kv_heads": max(1, case.heads // 2),
            "head_dim": case.hidden // case.heads,
            "ffn": -(-case.hidden * 8 // 3 // 8) * 8,
            "vocab": case.vocab,
            "max_seq_len": case.seq_len,
        }
    )
    sequences = case.micro_batch * (ranks if case.axis in ("dp", "pp") else 1)
    plan: dict[str, Any] = {
        case.axis: ranks,
        "zero": case.zero if ranks > 1 else 0,
        "precision": "bf16" if gpu else "fp32",
        "micro_batch_size": case.micro_batch,
        "global_batch_size": sequences,
        **case.changes,
    }
    return accept(
        {
            "kind": "train",
            "model": model.to_dict(),
            "plan": plan,
            "data": {"preset": "shakespeare"},
            "train": {
                "steps": WARM_UP + TIMED,
                "seq_len": case.seq_len,
                "seed": 1,
                "optimizer": {"name": "adamw", "lr": 1e-4},
                "clip_norm": 1.0,
            },
            "resources": {"devices": ranks},
        }
    )


def measure(
    environment: Environment,
    world: World,
    wanted: list[Case],
    *,
    goes_on: Callable[[], bool],
) -> Iterator[dict[str, Any]]:
    """`NodeStep` as data for each case, on all ranks; `goes_on` must agree between them."""
    environment.rank_directory.mkdir(parents=True, exist_ok=True)
    beacon = Beacon(environment.rank_directory, stages=environment.world_size)
    first = True
    for case in wanted:
        if not goes_on():
            return
        gpu = world.device.type == "cuda"
        run = run_of(case, ranks=environment.world_size, gpu=gpu)
        mesh = build_axes(run.plan, World(world.rank, world.size, world.device))
        samples = open_samples(
            run, cache=environment.cache, checkpoints=environment.rank_directory / "checkpoints"
        )[0]
        repeat = Repeat(
            run,
            environment,
            control=Requests(environment.directory, reads_file=False),
            beacon=beacon,
            on_point=lambda tokens, values: None,
        )
        repeat.train(mesh, samples)
        points = repeat.points.values[WARM_UP:]
        repeat.release_model()
        peak = _largest(world, max(point["memory/allocated_bytes"] for point in points))
        times = sorted(point["step_time_s"] for point in points)
        yield {
            "model": run.model.to_dict(),
            "plan": run.plan.to_dict(),
            "seq_len": case.seq_len,
            "step_time_s": _largest(world, median(times[: max(1, len(times) // 2)])),
            "slowest_s": _largest(world, times[-1]),
            "steps": len(times),
            "peak_bytes": round(peak) if first else None,
        }
        first = False


def _largest(world: World, value: float) -> float:
    if world.size == 1:
        return value
    held = torch.tensor(value, dtype=torch.float64, device=world.device)
    torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
    return float(held)
