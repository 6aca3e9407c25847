"""The batch script and the options of sbatch for an order. Pure."""

from __future__ import annotations

import math

from orchestrator.fleet.cluster_engines.settings import SlurmPool, SlurmSettings
from orchestrator.scheduling.cluster_engines.interface import Order
from workers.contracts.wire import names

# the batch script becomes srun, so that signals to the batch step reach the supervisors
_SCRIPT = """#!/bin/bash
# Run {run}, attempt {attempt} of Orrery: one supervisor per node.
umask 022
export HOME="$(getent passwd "$(id -u)" | cut -d: -f6)"
export USER="$(id -un)"
export PYTHONPATH="{source}"
export {ticket_name}={ticket}
if ! mkdir -p "{home}" || ! cd "{home}"; then
  echo "The engine's home {home} cannot be used." >&2
  exit 73
fi
exec srun --export=ALL --kill-on-bad-exit=0 --wait=0 "{python}" -u \\
  -m workers.launcher.cluster_engines.job
"""


def batch_script(order: Order, settings: SlurmSettings) -> str:
    """The script; the values of the settings contain no quotes."""
    return _SCRIPT.format(
        run=order.run,
        attempt=order.attempt,
        source=_home(settings.source),
        ticket_name=names.ENGINE_TICKET,
        ticket=order.ticket,
        home=_home(settings.home),
        python=_home(settings.python),
    )


def options(order: Order, settings: SlurmSettings) -> list[str]:
    """sbatch's options. `--requeue`: a requeued job is recognized and replaced by a new one."""
    pool = SlurmPool.from_dict(dict(order.pool))
    words = [
        "--parsable",
        f"--job-name={order.name}",
        f"--comment=orrery run {order.run} attempt {order.attempt}",
        f"--partition={pool.partition}",
        f"--nodes={order.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        "--export=ALL",
        "--chdir=/tmp",
        "--output=/tmp/orrery-%u-%j.log",
    ]
    if pool.account:
        words.append(f"--account={pool.account}")
    if pool.qos:
        words.append(f"--qos={pool.qos}")
    cpus = math.ceil(order.cpus) if order.cpus else 0
    cpus = cpus or order.per_node * (pool.cpus_per_device or (0 if order.gpu else 1))
    if cpus:
        words.append(f"--cpus-per-task={cpus}")
    if order.gpu:
        words.append(f"--gres={pool.gres}:{order.per_node}")
    if order.memory_gb:
        words.append(f"--mem={math.ceil(order.memory_gb * 1000)}M")
    if order.max_seconds:
        # the supervisor ends the run itself at max_seconds; Slurm's limit comes later
        words.append(f"--time={math.ceil((order.max_seconds + settings.stop_grace_s) / 60) + 5}")
    return [*words, *pool.options]


def _home(text: str) -> str:
    return "$HOME" + text[1:] if text.startswith("~") else text
