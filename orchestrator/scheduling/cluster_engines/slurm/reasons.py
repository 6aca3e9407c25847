"""Slurm's reasons and refusals as plain sentences. Pure text."""

from __future__ import annotations

_REASONS = {
    "": "Slurm has not considered the job yet",
    "Resources": "partition {partition} has too few free devices",
    "Priority": "jobs of higher priority wait before it in partition {partition}",
    "PartitionDown": "partition {partition} is down; an administrator must set it up again",
    "PartitionInactive": "partition {partition} is inactive and starts no jobs",
    "PartitionConfig": "the job cannot be placed in partition {partition} as it is configured",
    "PartitionNodeLimit": "the job needs more nodes than partition {partition} allows per job",
    "PartitionTimeLimit": "the job needs more time than partition {partition} allows; "
    "lower resources.max_seconds",
    "Reservation": "it waits for its advance reservation",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "BeginTime": "its earliest start has not come yet",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "it waits for a job that cannot end as required",
    "JobHeldUser": "its owner holds it; release it with scontrol release",
    "JobHeldAdmin": "an administrator of Slurm holds it",
    "Licenses": "no license is free",
    "AssociationJobLimit": "the account's limit of running jobs is reached",
    "AssocMaxJobsLimit": "the account's limit of running jobs is reached",
    "InvalidAccount": "the account is not valid; correct `account` of the pool",
    "InvalidQOS": "the QOS is not valid; correct `qos` of the pool",
    "AccountNotAllowed": "the account may not use partition {partition}",
    "Cleaning": "the previous start of the job is being cleaned up",
    "launch failed requeued held": "its start failed and Slurm holds it; release it with "
    "scontrol release",
}
_PREFIXES = {
    "Nodes required for job are DOWN, DRAINED": "nodes that it needs are down, drained or reserved",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "QOSMax": "a limit of the QOS is reached",
    "QOSGrp": "the QOS's limit for all its users is reached",
    "QOSMin": "the QOS requires a larger job",
    "AssocMax": "a limit of the account is reached",
    "AssocGrp": "the account's limit for all its users is reached",
    "MaxCpuPer": "a limit of the account is reached",
}
# part of sbatch's message → what to change
_REFUSALS = {
    "invalid partition": "The partition does not exist. Correct `partition` of the pool, or "
    "choose another pool.",
    "invalid account": "The user has no such account, or the account may not use the partition. "
    "Correct `account` of the pool, or ask Slurm's administrator for the right.",
    "invalid qos": "The QOS does not exist, or the account may not use it. Correct `qos` of the "
    "pool.",
    "user's group not permitted": "The user may not use the partition. Choose another pool, or ask "
    "Slurm's administrator.",
    "access/permission denied": "Slurm refuses the submitter. Check the engine's `identity`, and "
    "the user's rights in Slurm.",
    "invalid --uid": "No Unix user on the control plane's machine has the submitter's name. Create "
    "it, or set the engine's `identity` to service.",
    "only the root user can use --uid": "Only a control plane that runs as root can submit as "
    "other users. Set the engine's `identity` to service.",
    "requested node configuration is not available": "No node of the partition has so many "
    "devices, CPUs or so much memory. Request fewer, or choose another pool.",
    "invalid generic resource": "The partition's nodes have no such GPUs. Correct `gres` of the "
    "pool, or choose another pool.",
    "node count specification invalid": "The partition has fewer nodes than the run needs. Request "
    "fewer devices.",
    "requested time limit is invalid": "The partition allows less time. Lower "
    "resources.max_seconds.",
    "unspecified error": "Slurm gave no reason; see slurmctld's log.",
}
_LATER = (
    "slurm temporarily unable to accept job",
    "job violates accounting/qos policy",
    "resource temporarily unavailable",
    "accounting limit",
    "reached maximum job count",
)

_ENDED = (
    "already completing or completed",
    "invalid job id",
    "scancel ended with code",  # --quiet: without a text
)


def waiting(reason: str, partition: str) -> str:
    """Why a pending job waits, as the end of a sentence."""
    text = _REASONS.get(reason)
    if text is None:
        text = next((text for start, text in _PREFIXES.items() if reason.startswith(start)), None)
    return (text or "Slurm gives a reason of its own").format(partition=partition)


def refusal_hint(message: str) -> str:
    """What to change after sbatch refused a job."""
    lower = message.lower()
    return next((hint for part, hint in _REFUSALS.items() if part in lower), "")


def is_temporary(message: str) -> bool:
    """Whether sbatch may accept the job later."""
    return any(part in message.lower() for part in _LATER)


def has_ended(text: str) -> bool:
    """Whether this error of scancel says that the job is ending, has ended, or is not known."""
    return any(words in text.lower() for words in _ENDED)
