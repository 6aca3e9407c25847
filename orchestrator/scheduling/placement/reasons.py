"""Messages for users about why a run waits: what it needs, what is free, and who holds the rest.

Pure text. Does not depend on how decisions are made; a message changes only if its facts change, so
rows are not rewritten needlessly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.scheduling.placement.capacity import NodeView, Window
    from orchestrator.scheduling.policy import QueuedRun

UNDECIDED = "The scheduler considers this run at its next pass."
NEXT_PASS = "Starts at the next scheduling pass."
_SHOWN = 3


def back_off(until: float) -> str:
    """The run may not start before `until` (Unix seconds)."""
    return (
        f"Waiting until {datetime.fromtimestamp(until, UTC):%H:%M:%S} UTC before its next attempt."
    )


def over_quota(devices: int, pool: str, owner: str, quota: int, used: int) -> str:
    """The run would exceed its owner's quota, now or, if it is larger than the quota, always."""
    needed = f"{devices} device{'' if devices == 1 else 's'}"
    if devices > quota:
        return (
            f"Waiting for {needed}: pool {pool} allows each user {quota} at a time. "
            f"Request {quota} or fewer; otherwise the run waits until an administrator raises "
            "the quota."
        )
    return (
        f"Waiting for {needed}: pool {pool} allows {owner or 'each user'} {quota} "
        f"at a time and {used} are in use. It starts when the owner's other runs end."
    )


def over_team_quota(devices: int, team: str, quota: int, used: int) -> str:
    """The run would exceed its team's quota, now or, if it is larger than the quota, always."""
    needed = f"{devices} device{'' if devices == 1 else 's'}"
    if devices > quota:
        return (
            f"Waiting for {needed}: team {team} may hold {quota} at a time. Request {quota} or "
            "fewer; otherwise the run waits until an administrator raises the quota."
        )
    return (
        f"Waiting for {needed}: team {team} may hold {quota} at a time and {used} are in use. "
        "It starts when other runs of the team end."
    )


def checkpoint_unavailable(run: QueuedRun, nodes: Sequence[str]) -> str:
    """The nodes with the run's checkpoint are silent."""
    return (
        f"Waiting for node {', '.join(nodes)}, which stores the run's checkpoint and sends no "
        "heartbeats."
    )


def checkpoint_busy(
    run: QueuedRun, nodes: Sequence[str], free: int, total: int, holders: str
) -> str:
    """The nodes with the run's checkpoint are up, but their devices are in use or reserved."""
    return (
        f"Waiting for {_devices(run)} on {', '.join(nodes)}, which stores the run's checkpoint; "
        f"{free} of {total} are free. {holders}"
    ).rstrip()


def avoiding(run: QueuedRun, nodes: Sequence[str], free: int, total: int, holders: str) -> str:
    """The run avoids the nodes of its last failure for a while, and the others are in use."""
    until = f"{datetime.fromtimestamp(run.avoid_until or 0.0, UTC):%H:%M:%S}"
    return (
        f"Waiting for {_devices(run)}: its last attempt failed on {', '.join(nodes)}, which it "
        f"avoids until {until} UTC; {free} of {total} on other nodes are free. {holders}"
    ).rstrip()


def reserved(run: QueuedRun, first: int, free: int) -> str:
    """The free devices are reserved for the first run of the pool."""
    return (
        f"Waiting for {_devices(run)} in pool {run.pool}: {free} are free but reserved for run "
        f"{first}, which has waited longer."
    )


def uneven(run: QueuedRun, counts: Sequence[int], *, ever: bool) -> str:
    """The nodes' device counts do not fit the gang evenly; `ever`: not even if all were free."""
    spread = " + ".join(str(count) for count in sorted(counts, reverse=True) if count) or "0"
    same = "torchrun needs the same number of ranks on every node"
    if ever:
        return (
            f"Waiting for {_devices(run)}: the nodes of pool {run.pool} have {spread}, but {same}. "
            "Request a number that divides evenly, or add devices."
        )
    return (
        f"Waiting for {_devices(run)} in pool {run.pool}: enough are free, but as {spread} per "
        f"node, and {same}."
    )


def behind(run: QueuedRun, limit: int) -> str:
    """More runs wait before this one in its pool than a pass tries."""
    return (
        f"Waiting for {_devices(run)}: more than {limit:,} runs of pool {run.pool} are before it."
    )


def first_window(excluded: Mapping[str, Window]) -> tuple[Window, list[str]]:
    """The window that begins first, and its nodes by name."""
    first = min(excluded.values(), key=lambda window: (window.start, window.end, window.team))
    return first, sorted(each for each, its in excluded.items() if its == first)


def window(run: QueuedRun, first: Window, names: Sequence[str], *, now: float) -> str:
    """The run may last into a window of the nodes that would fit it, or the window is now."""
    nodes = ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
    verb = "is" if len(names) == 1 else "are"
    purpose = f"for team {first.team}" if first.team else "for maintenance"
    if first.start <= now:
        return (
            f"Waiting for {_devices(run)}: {nodes} {verb} reserved {purpose} until "
            f"{_time(first.end)} UTC. It may start after that."
        )
    times = f"from {_time(first.start)} to {_time(first.end)} UTC"
    if math.isfinite(run.longest_s):
        may = f"the run may last {_duration(run.longest_s)}"
    else:
        may = "the run has no time limit"
    return (
        f"Waiting for {_devices(run)}: {nodes} {verb} reserved {purpose} {times}, and {may}. It "
        f"starts after that, or now with a time limit that ends before {_time(first.start)} UTC."
    )


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _duration(seconds: float) -> str:
    if seconds < 5400:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def busy(run: QueuedRun, free: int, total: int, holders: str) -> str:
    """Other runs hold the devices; `holders` comes from `describe_holders`."""
    return (
        f"Waiting for {_devices(run)} in pool {run.pool}; {free} of {total} are free. {holders}"
    ).rstrip()


def describe_holders(holders: Mapping[int, int]) -> str:
    """Runs and the numbers of devices that they hold, the largest first."""
    ordered = sorted(holders.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"run {run} holds {count}" for run, count in ordered[:_SHOWN]]
    if len(ordered) > _SHOWN:
        rest = ordered[_SHOWN:]
        verb = "run holds" if len(rest) == 1 else "runs hold"
        parts.append(f"{len(rest)} more {verb} {sum(count for _, count in rest)}")
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def too_few_devices(run: QueuedRun, total: int, nodes: Sequence[NodeView]) -> str:
    """The pool's usable nodes have fewer devices than the run needs."""
    unusable = [node for node in nodes if node.pool == run.pool and not node.usable]
    text = f"Waiting for {_devices(run)}: pool {run.pool} has {total} in total"
    if unusable:
        return f"{text}, because {_unusable(unusable)}."
    return f"{text}. Request {total} or fewer, or add a node."


_SUPPORT = {
    "images": "run images (Docker or Apptainer)",
    "limits": "limit memory, CPU time or processes (systemd)",
    "limits of images": "limit memory, CPU time or processes of images (Docker, or systemd)",
}


def unsupported(run: QueuedRun, needs: Sequence[str]) -> str:
    """No usable node of the pool supports what the run needs; a node's page says what it does."""
    verbs = " and ".join(_SUPPORT.get(need, need) for need in needs)
    return (
        f"Waiting for {_devices(run)}: no usable node of pool {run.pool} can {verbs}. Choose "
        "another pool, or install it on a node and restart its agent."
    )


def no_devices(run: QueuedRun, nodes: Sequence[NodeView]) -> str:
    """No usable node of the pool has a device of the requested kind."""
    in_pool = [node for node in nodes if node.pool == run.pool]
    if not in_pool:
        return (
            f"Waiting for {_devices(run)}: pool {run.pool} has no node. Add one, or choose "
            "another pool."
        )
    unusable = [node for node in in_pool if not node.usable]
    if len(unusable) == len(in_pool):
        return (
            f"Waiting for {_devices(run)}: no node of pool {run.pool} accepts work; "
            f"{_unusable(unusable)}."
        )
    kinds = sorted({slot.kind for node in in_pool if node.usable for slot in node.slots})
    return (
        f"Waiting for {_devices(run)}: pool {run.pool} has only "
        f"{', '.join(kinds) or 'nodes without devices'}."
    )


def _unusable(nodes: Sequence[NodeView]) -> str:
    return ", ".join(f"{node.name} is {node.unusable_reason}" for node in nodes[:_SHOWN])


def _devices(run: QueuedRun) -> str:
    noun = "device" if run.devices == 1 and run.most <= 1 else "devices"
    if run.most > run.devices:
        kind = f"{run.device} " if run.device else ""
        return f"{run.devices} to {run.most} {kind}{noun}"
    return f"{run.devices} {run.device} {noun}" if run.device else f"{run.devices} {noun}"
