"""`python -m workers.probe.suite --out FOLDER`: a node's probe on one rank, with torchrun's
environment.

Writes `rank-<n>.json` after each stage: the stage in progress, results so far, and an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from workers.contracts.specs.plan import ParallelPlan
from workers.runtime.environment import Environment, read_environment

_KIB = 2**10
_SHORT_SIZES = (4 * _KIB, 256 * _KIB, 4096 * _KIB)
_SHORT_KINDS = ("all_reduce", "all_gather")


def main() -> int:
    """Measure all stages in the given time; 1 after a failure, which the file describes."""
    parser = argparse.ArgumentParser(prog="workers.probe.suite", description="Probe one rank.")
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, required=True, help="time for all stages")
    parser.add_argument("--short", action="store_true", help="leave out the larger shapes")
    options = parser.parse_args()
    environment = read_environment(options.out)
    results: dict[str, Any] = {"stage": "start", "rates": [], "steps": [], "link": None}
    try:
        _measure(environment, results, seconds=options.seconds, short=options.short)
    except Exception as error:  # any error of torch or the driver is a result
        results["error"] = f"{type(error).__name__}: {error}"[:500]
        _write(environment, results)
        print(results["error"], file=sys.stderr, flush=True)
        os._exit(1)  # a broken communicator may block the interpreter's exit
    sys.stdout.flush()
    os._exit(0)


def _measure(
    environment: Environment, results: dict[str, Any], *, seconds: float, short: bool
) -> None:
    end = time.monotonic() + seconds
    _write(environment, results)
    from workers.runtime.program import fast_import, set_torch_defaults

    set_torch_defaults()
    with fast_import():
        from workers.probe import kernels, steps
        from workers.training.benchmark.collectives import measure_collectives
        from workers.training.parallel.mesh import start_world

    def enter(stage: str) -> None:
        results["stage"] = stage
        _write(environment, results)

    ranks = environment.world_size
    world = start_world(environment, ParallelPlan.from_dict({"dp": ranks}))
    gpu = world.device.type == "cuda"
    enter("rates")
    world.barrier()
    for rate in kernels.rates(world.device, short=short):
        results["rates"].append(rate)
    if ranks > 1:
        enter("collectives")
        measured = measure_collectives(
            world,
            local_world_size=environment.local_world_size,
            mark_progress=lambda: None,
            sizes=_SHORT_SIZES if short else None,
            kinds=_SHORT_KINDS if short else None,
        )
        results["link"] = measured["link"]
        results["rates"] += [
            {
                "measure": row["kind"],
                "setting": _size(row["bytes"]),
                "value": row["bus_bytes_per_s"],
                "seconds": row["seconds"],
            }
            for row in measured["rows"]
        ]
    enter("steps")

    def goes_on() -> bool:
        """Whether there is time for another run, as all ranks see it."""
        import torch

        left = torch.tensor(float(time.monotonic() >= end), device=world.device)
        return float(world.sum_(left)) == 0

    wanted = steps.cases(gpu=gpu, ranks=ranks, short=short)
    for step in steps.measure(environment, world, wanted, goes_on=goes_on):
        results["steps"].append(step)
        _write(environment, results)
    enter("done")


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 2**20 else f"{number >> 10} KiB"


def _write(environment: Environment, results: dict[str, Any]) -> None:
    path = environment.directory / f"rank-{environment.rank}.json"
    temporary = path.with_name("." + path.name)
    temporary.write_text(json.dumps(results))
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
