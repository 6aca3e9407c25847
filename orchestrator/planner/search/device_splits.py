"""Splits of devices between training and separate rollouts, for requests that leave it open.

Pure functions of a search request. Does not depend on Django or formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.planner.plan_request import BadRequest
from workers.contracts.base import problem
from workers.contracts.specs.cluster import ClusterSpec

MOST_SPLITS = 12  # of many devices, spread evenly


def split_numbers(total: int) -> list[int]:
    """Devices of rollouts to try: all, or some that are spread evenly."""
    if total - 1 <= MOST_SPLITS:
        return list(range(1, total))
    steps = [round(total * part / (MOST_SPLITS + 1)) for part in range(1, MOST_SPLITS + 1)]
    return sorted({min(total - 1, max(1, each)) for each in steps})


def leaves_split_open(request: Any) -> bool:
    """Whether a search request has `rollout.devices` "auto"."""
    rollout = _rollout(request)
    return rollout is not None and rollout.get("devices") == "auto"


def search_splits(
    request: Mapping[str, Any],
    cluster: ClusterSpec,
    search: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The answer of the split whose best plan has the shortest step, with all `splits` compared.

    `search` answers a request whose cluster are the training devices. Plans that fit are preferred.
    Raises BadRequest if there is nothing to split.
    """
    total = cluster.nodes * cluster.devices_per_node
    if total < 2:
        message = f"auto splits the cluster's devices, and {total} cannot be split"
        raise BadRequest([problem(_field(request), message, "Use a cluster of 4 devices.")])
    splits: list[dict[str, Any]] = []
    for rollouts in split_numbers(total):
        answer = search({**_with_split(request, cluster, rollouts), "top": 1})
        best = answer["plans"][0] if answer["plans"] else answer.get("closest")
        splits.append(
            {
                "training": total - rollouts,
                "rollouts": rollouts,
                "plan": None if best is None else best["plan"],
                "step_time_s": None if best is None else best["step_time_s"],
                "fits": bool(answer["fit"]),
            }
        )
    timed = [each for each in splits if each["step_time_s"] is not None]
    fitting = [each for each in timed if each["fits"]] or timed or splits
    chosen = min(fitting, key=lambda each: (each["step_time_s"] or 0.0, each["rollouts"]))
    return {
        **search(_with_split(request, cluster, chosen["rollouts"])),
        "rollout_devices": chosen["rollouts"],
        "splits": splits,
    }


def _with_split(request: Mapping[str, Any], cluster: ClusterSpec, rollouts: int) -> dict[str, Any]:
    """The request for the training devices that `rollouts` leaves, on as few nodes as possible."""
    training = cluster.nodes * cluster.devices_per_node - rollouts
    per_node = next(
        number
        for number in range(min(training, cluster.devices_per_node), 0, -1)
        if training % number == 0
    )
    sizes = {"nodes": training // per_node, "devices_per_node": per_node}
    given = request["cluster"]
    named = given if isinstance(given, Mapping) else cluster.to_dict()
    train, objective = request["train"], str(request["train"]["objective"])
    rollout = {**(_rollout(request) or {}), "devices": rollouts}
    body = {**train[objective], "rollout": rollout}
    return {
        **request,
        "cluster": {**named, **sizes},
        "train": {**train, objective: body},
    }


def _rollout(request: Any) -> dict[str, Any] | None:
    """The request's rollout options; None without any."""
    value = request
    for name in ("train", None, "rollout"):
        if not isinstance(value, Mapping):
            return None
        value = value.get(str(value.get("objective")) if name is None else name)
    return dict(value) if isinstance(value, Mapping) else None


def _field(request: Mapping[str, Any]) -> str:
    return f"train.{request['train']['objective']}.rollout.devices"
