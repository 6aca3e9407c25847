"""Probes this node: refuses a busy one, starts a process per rank, merges their results.

Does not load torch; the processes of `workers.probe.suite` do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from workers.contracts.wire.maintenance.node_probe import BUSY_SHARE, NodeProbeReport
from workers.contracts.wire.versions import RELEASE

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.05
_GRACE_S = 30.0  # beyond the requested time: the start, and the step in progress


class ProbeError(Exception):
    """The node was not probed; says why and what to do."""


def probe_node(
    *,
    seconds: float,
    ranks: int,
    device: str,
    gpu: bool,
    short: bool = False,
    force: bool = False,
    keeps_on: Callable[[], bool] = lambda: True,
) -> NodeProbeReport:
    """Measure the node with one process per device for about `seconds`.

    `force` measures a busy node too. `keeps_on` is asked often; after False the probe ends. Raises
    ProbeError for a busy node, a probe that was interrupted, and one that measured nothing.
    """
    load = other_load()
    if not force and (reason := busy_reason(load, gpu=gpu)):
        raise ProbeError(reason)
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="orrery-probe-"))
    try:
        started = _start(folder, seconds=seconds, ranks=ranks, gpu=gpu, short=short)
        exits = _wait(started, limit_s=seconds + _GRACE_S, keeps_on=keeps_on)
        results = [_read(folder / f"rank-{rank}.json") for rank in range(ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return merged(
        results,
        exits,
        kind="gpu" if gpu else "cpu",
        device=device,
        short=short,
        load=load,
        seconds=time.monotonic() - begin,
    )


def other_load(interval_s: float = 0.5) -> float:
    """The share of this machine's cores that programs use now."""
    return float(psutil.cpu_percent(interval=interval_s)) / 100


def busy_reason(load: float, *, gpu: bool) -> str | None:
    """Why the node is too busy to measure, or None."""
    if gpu and (running := _gpu_programs()):
        return f"{running} programs use the GPUs; end them first"
    if load > BUSY_SHARE:
        cores = os.cpu_count() or 1
        return (
            f"programs use {load * cores:.1f} of {cores} cores (limit {BUSY_SHARE:.0%}); wait "
            "until the node is idle, or force the probe and its numbers count less"
        )
    return None


def _gpu_programs() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return sum(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles)
    except Exception:  # no driver, or one that does not report them
        return 0


def merged(
    results: Sequence[Mapping[str, Any]],
    exits: Sequence[int | None],
    *,
    kind: str,
    device: str,
    short: bool,
    load: float,
    seconds: float,
) -> NodeProbeReport:
    """The node's report from the files of its ranks: the slowest rank's rates.

    Raises ProbeError if a rank measured nothing.
    """
    problems = []
    for rank, (one, code) in enumerate(zip(results, exits, strict=True)):
        if one.get("stage") != "done":
            why = one.get("error") or ("it took too long" if code is None else f"exit code {code}")
            problems.append(f"rank {rank} ended at {one.get('stage', 'start')}: {why}")
    if not all(one.get("rates") for one in results):
        raise ProbeError("; ".join(problems) or "a rank measured nothing")
    rates: dict[tuple[str, str], dict[str, Any]] = {}
    for one in results:
        for rate in one["rates"]:
            key = (rate["measure"], rate["setting"])
            known = rates.get(key)
            worse = max if rate["measure"] == "host" else min
            if known is None or worse(rate["value"], known["value"]) != known["value"]:
                rates[key] = {**rate, "ranks": len(results)}
    return NodeProbeReport.from_dict(
        {
            "kind": kind,
            "device": device,
            "short": short,
            "time": time.time(),
            "seconds": seconds,
            "ranks": len(results),
            "cores": os.cpu_count() or 1,
            "load": load,
            "versions": {"orrery": RELEASE, "torch": _torch_version()},
            "rates": list(rates.values()),
            "steps": results[0].get("steps", []),
            "link": results[0].get("link"),
            "problems": problems,
        }
    )


def _torch_version() -> str:
    import importlib.metadata

    return importlib.metadata.version("torch")


def _start(
    folder: Path, *, seconds: float, ranks: int, gpu: bool, short: bool
) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "workers.probe.suite", "--out", str(folder)]
    command += ["--seconds", str(seconds), *(["--short"] if short else [])]
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("ORRERY_")
    }
    common = {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ORRERY_PG_TIMEOUT_S": str(round(seconds + _GRACE_S)),
    }
    if not gpu:
        common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        common["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    started = []
    for rank in range(ranks):
        with open(folder / f"rank-{rank}.log", "wb") as log:
            started.append(
                subprocess.Popen(
                    command,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return started


def _wait(
    started: Sequence[subprocess.Popen[bytes]], *, limit_s: float, keeps_on: Callable[[], bool]
) -> list[int | None]:
    """Exit codes, None after a timeout; ends the others when one fails. Raises ProbeError."""
    end = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in started):
            if not keeps_on():
                raise ProbeError("the probe was interrupted, because the node got work")
            if time.monotonic() > end or any(each.poll() not in (None, 0) for each in started):
                break
            time.sleep(_POLL_S)
        return [process.poll() for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
