"""What a job's environment says about it: which node this is, which job, where the first node is.

Reads variables of Slurm, or those that a pod of a JobSet has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.contracts.wire import names


class NotInJob(RuntimeError):
    """The environment is not that of a job; the message says how to start one."""


@dataclass(frozen=True)
class JobEnvironment:
    """This node of a job. `job` identifies the start of this node: no other start has the same.

    `first_host`: the first node's address for the others, or None. `requeued`: the engine starts
    the same job again.
    """

    node_rank: int
    job: str
    first_host: str | None = None
    requeued: bool = False


def job_environment(variables: Mapping[str, str]) -> JobEnvironment:
    """The environment of a job. Raises NotInJob outside of one."""
    if pod := variables.get(names.JOB_ID):
        return JobEnvironment(
            node_rank=_number(
                variables,
                "JOB_COMPLETION_INDEX",
                "Start this program as a pod of an indexed Job.",
            ),
            job=pod,
            first_host=variables.get(names.JOB_HOST) or None,
        )
    return JobEnvironment(
        node_rank=_number(variables, "SLURM_NODEID", "Start this program with srun."),
        job=variables.get("SLURM_JOB_ID", "unknown"),
        first_host=variables.get("SLURM_LAUNCH_NODE_IPADDR") or None,
        requeued=bool(int(variables.get("SLURM_RESTART_COUNT") or 0)),
    )


def _number(variables: Mapping[str, str], name: str, hint: str) -> int:
    try:
        return int(variables[name])
    except (KeyError, ValueError):
        raise NotInJob(f"{name} is not set. {hint}") from None
