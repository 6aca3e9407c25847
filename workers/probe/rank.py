"""`python -m workers.probe.rank --out FOLDER`: the probe of one rank, with torchrun's environment.

Writes `rank-<n>.json` after each stage: the stage in progress, the rates so far, and an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workers.probe import measure

_COLLECTIVE_S = 60.0


def main() -> int:
    """Measure all stages; 1 after a failure, which the file describes."""
    parser = argparse.ArgumentParser(prog="workers.probe.rank", description="Probe one rank.")
    parser.add_argument("--out", required=True, type=Path, help="folder of the results")
    folder = parser.parse_args().out
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    results: dict[str, Any] = {"rank": rank, "local_rank": local, "stage": "start"}
    try:
        _measure(results, folder)
    except Exception as error:  # any error of torch or the driver is a result
        results["error"] = f"{type(error).__name__}: {error}"[:500]
        _write(folder, results)
        print(results["error"], file=sys.stderr, flush=True)
        os._exit(1)  # a broken communicator may block the interpreter's exit
    return 0


def _measure(results: dict[str, Any], folder: Path) -> None:
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    world = int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)

    def enter(stage: str) -> None:
        results["stage"] = stage
        _write(folder, results)

    enter("matmul")
    results["matmul"] = measure.matmul_flops(device)
    enter("memory")
    results["memory"] = measure.memory_bytes_per_s(device)
    if world > 1:
        enter("connect")
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=_COLLECTIVE_S))
        if 1 < per_node < world:
            enter("all_reduce_node")
            # every rank creates every group, in the same order
            groups = [
                dist.new_group(list(range(first, first + per_node)))
                for first in range(0, world, per_node)
            ]
            mine = groups[int(os.environ["RANK"]) // per_node]
            results["all_reduce_node"] = measure.all_reduce_bytes_per_s(mine, device)
        stage = "all_reduce_node" if per_node == world else "all_reduce"
        enter(stage)
        results[stage] = measure.all_reduce_bytes_per_s(None, device)
        dist.destroy_process_group()
    enter("done")


def _write(folder: Path, results: dict[str, Any]) -> None:
    path = folder / f"rank-{results['rank']}.json"
    temporary = path.with_name("." + path.name)
    temporary.write_text(json.dumps(results))
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
