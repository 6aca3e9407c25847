"""Commands of the engine in processes that are forked from one with torch loaded.

What runs is what `python -m MODULE` runs; only torch's import, three CPU seconds for each process,
is saved.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass
class Ended:
    """The exit codes of the ranks, and what they have printed."""

    codes: list[int | None]
    output: str


def run_module(
    module: str, *arguments: str, output: Path, ranks: int = 1, cwd: Path = ROOT
) -> Ended:
    """`python -m module arguments` on `ranks` processes, with the variables that torchrun sets if
    there are several; `output` is a new file for what they print.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.workers.training.rank_imports"])
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if ranks > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    output.touch()
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        given = (module, arguments, str(cwd), str(output), common | own)
        processes.append(context.Process(target=_run, args=given, name=f"{module} {rank}"))
        processes[-1].start()
    for process in processes:
        process.join()
    return Ended([process.exitcode for process in processes], output.read_text())


def _run(
    module: str, arguments: tuple[str, ...], cwd: str, output: str, environ: dict[str, str]
) -> None:
    os.chdir(cwd)
    os.environ.update(environ)
    sink = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
