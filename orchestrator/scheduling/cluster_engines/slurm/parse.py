"""Reads the output of Slurm's commands (22.05 and later). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from orchestrator.scheduling.cluster_engines.interface import JobView, Partition
from workers.contracts.exit_classes import ExitClass

PREFIX = "orrery-"
# name first, so that lines of other jobs are skipped quickly; the reason may contain anything
SQUEUE_FORMAT = "%j|%A|%T|%S|%N|%r"
SINFO_FORMAT = "%R|%a|%D|%F|%c|%m|%l|%G"
SACCT_FORMAT = "JobName,JobIDRaw,State,Reason,NodeList"

_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_ACTIVE = {
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
    "POWER_UP_NODE",
}
# COMPLETED and FAILED say only how srun ended: the supervisors report more
_ENDED: dict[str, ExitClass | None] = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": ExitClass.CANCELLED,
    "REVOKED": ExitClass.CANCELLED,
    "PREEMPTED": ExitClass.PREEMPTED,
    "TIMEOUT": ExitClass.USER_ERROR,
    "DEADLINE": ExitClass.USER_ERROR,
    "NODE_FAIL": ExitClass.LOST,
    "BOOT_FAIL": ExitClass.INFRASTRUCTURE,
    "LAUNCH_FAILED": ExitClass.INFRASTRUCTURE,
    "OUT_OF_MEMORY": ExitClass.OUT_OF_MEMORY,
}


def jobs(text: str) -> Iterator[JobView]:
    """Orrery's jobs in the output of `squeue -o SQUEUE_FORMAT`."""
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        parts = line.split("|", 5)
        if len(parts) == 6:
            name, number, state, start, nodes, reason = parts
            yield view(name, number, state, reason, nodes, start)


def view(
    name: str, number: str, state: str, reason: str = "", nodes: str = "", start: str = ""
) -> JobView:
    """A job by Slurm's words; a state that is not known counts as active: nothing is concluded."""
    word = state.split(" ")[0].split("+")[0].upper()
    phase = "pending" if word in _PENDING else "ended" if word in _ENDED else "active"
    return JobView(
        name=name,
        number=number,
        phase=phase,
        state=word,
        reason="" if reason in ("None", "(null)") else reason.strip("()"),
        hosts=tuple(hostnames(nodes)),
        expected_start=_time(start) if phase == "pending" else None,
        exit_class=_ENDED.get(word),
    )


def job_fields(text: str) -> dict[str, str]:
    """The first job of `scontrol show job -o`, which may contain blanks in few fields."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    pairs = re.findall(r"(?:^|\s)([A-Z][A-Za-z/:]*)=(.*?)(?=\s+[A-Z][A-Za-z/:]*=|\s*$)", line)
    return dict(reversed(pairs))


def accounted(text: str) -> list[JobView]:
    """Jobs in the output of `sacct -nPX -o SACCT_FORMAT`."""
    rows = [line.split("|") for line in text.splitlines()]
    return [view(*row[:5]) for row in rows if len(row) >= 5]


def partitions(text: str) -> list[Partition]:
    """Partitions in the output of `sinfo -h -o SINFO_FORMAT`; lines of one partition are merged."""
    merged: dict[str, Partition] = {}
    for line in text.splitlines():
        parts = line.split("|", 7)
        if len(parts) != 8:
            continue
        name, up, count, states, cpus, memory, limit, gres = parts
        gpus, kind = _gpus(gres)
        before = merged.get(name, Partition(name))
        merged[name] = Partition(
            name=name,
            nodes=before.nodes + _number(count),
            nodes_idle=before.nodes_idle + _number(f"{states}//".split("/")[1]),
            cpus_per_node=max(before.cpus_per_node, _number(cpus)),
            gpus_per_node=max(before.gpus_per_node, gpus),
            gpu_type=kind or before.gpu_type,
            memory_mb=max(before.memory_mb, _number(memory)),
            limit_s=_limit(limit),
            up=up == "up",
        )
    return list(merged.values())


def addresses(text: str) -> dict[str, str]:
    """`{node: address}` in the output of `scontrol show nodes -o`."""
    matches = re.findall(r"^NodeName=(\S+).*?\sNodeAddr=(\S+)", text, re.MULTILINE)
    return dict(matches)


def hostnames(text: str) -> list[str]:
    """The nodes of a Slurm node list: `n[1-2,07],x3` is n1, n2, n07, x3."""
    if not text or text in ("(null)", "None assigned", "None"):
        return []
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names += _expanded(part)
    return names


def _expanded(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part)
    if match is None:
        return [part]
    head, ranges, tail = match.groups()
    names = []
    for piece in ranges.split(","):
        low, _, high = piece.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            return [part]
        for number in range(int(low), int(high or low) + 1):
            names += [f"{head}{number:0{len(low)}d}{rest}" for rest in _expanded(tail)]
    return names


def _gpus(gres: str) -> tuple[int, str]:
    """GPUs per node, and their type, of `gpu:h100:8(S:0-1)`."""
    total, kind = 0, ""
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = item.split(":")
        if parts[0] == "gpu":
            total += _number(parts[-1]) if len(parts) > 1 else 1
            kind = parts[1] if len(parts) > 2 else kind
    return total, kind


def _limit(text: str) -> int | None:
    """Seconds of `infinite`, `30`, `10:00`, `2:00:00` or `1-12:00:00`; the last without days."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if len(parts) == 1:
        parts = [0, parts[0], 0] if not days else [parts[0], 0, 0]
    elif len(parts) == 2:
        parts = [0, *parts] if not days else [*parts, 0]
    hours, minutes, seconds = parts
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 0


def _time(text: str) -> datetime | None:
    """Slurm prints local time without a zone."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None
