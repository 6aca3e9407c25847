"""The time and cost of a whole training run: its steps, and what comes on top of them.

The start is learned from ended runs of the pool, restarts from its failures. Does not count
waiting for devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, Final

from orchestrator.runs.models import Run
from orchestrator.runs.submission.prediction.expected_restarts import failure_rate, restarts_s
from workers.contracts import RunSpec

# seconds from an attempt's placement to its first step without ended runs: processes, imports,
# process group, model, data; torch.compile compiles each kind of block
_START_S: Final = {"cpu": 8.0, "gpu": 25.0}
_COMPILE_S: Final = 60.0
_FORWARD_SHARE: Final = 1 / 3  # of the compute of a step; the backward pass is twice the forward
# a checkpoint: collecting, planning and committing it, and bytes per second of its files
_SAVE_S: Final = 0.3
_SAVE_BYTES_PER_S: Final = 4e8
_COPY_BYTES_PER_S: Final = 4e9  # an asynchronous one only copies states before training continues
_RECENT: Final = 10
_START_ERROR: Final = 0.4  # of the start and checkpoints, as a share
_LEAST_START_S: Final = 0.5


def whole_run(
    prediction: Mapping[str, Any], spec: RunSpec, *, pool: str, trials_s: float = 0.0
) -> dict[str, Any]:
    """`{total_s, low_s, high_s, usd, terms {start_s, steps_s, rollouts_s?, evaluation_s,
    checkpoints_s, restarts_s, trials_s?}, start_from, restarts}`.

    `trials_s` are those of trials of plans before it; `rollouts_s` what steps spend on rollouts,
    the rest of them is `steps_s`. `usd` is at the price of the devices, `start_from` the number of
    ended runs that the start is learned from, `restarts` {expected, failures, node_hours} the
    expected number, and what it is learned from.
    """
    train = spec.train
    assert train is not None
    starts = learned_starts(pool=pool, device=str(prediction.get("device")))
    kind = "cpu" if prediction.get("device") == "cpu" else "gpu"
    start = median(starts) if starts else _START_S[kind] + _COMPILE_S * bool(train.compile)
    steps = train.steps * prediction["step_time_s"]
    evaluation = 0.0
    if train.eval is not None:
        rounds = train.steps // train.eval.every_steps
        forward = prediction["time"]["compute_s"] * _FORWARD_SHARE
        evaluation = rounds * train.eval.batches * forward
    checkpoints = 0.0
    if train.checkpoint is not None:
        memory = prediction["memory"]
        size = memory["params_bytes"] + memory["optimizer_bytes"]
        rate = _COPY_BYTES_PER_S if train.checkpoint.async_ else _SAVE_BYTES_PER_S
        count = -(-train.steps // train.checkpoint.every_steps)
        # nothing overlaps with the last one
        checkpoints = count * (_SAVE_S + size / rate) + size / _SAVE_BYTES_PER_S
    rollouts = train.steps * float(prediction.get("rollout_s") or 0.0)
    failing = failure_rate(pool=pool)
    nodes = int((prediction.get("cluster") or {}).get("nodes") or 1)
    work = steps + evaluation + checkpoints
    every = None if train.checkpoint is None else work * train.checkpoint.every_steps / train.steps
    restarts = restarts_s(failing, nodes=nodes, work_s=work, start_s=start, checkpoint_s=every)
    beyond = start + evaluation + checkpoints + trials_s + restarts
    total = steps + beyond
    low = train.steps * prediction["step_time_low_s"] + (1 - _START_ERROR) * beyond
    high = train.steps * prediction["step_time_high_s"] + (1 + _START_ERROR) * beyond
    return {
        "total_s": total,
        "low_s": low,
        "high_s": high,
        "usd": _usd(prediction, spec, steps_s=steps, total_s=total),
        "terms": {
            "start_s": start,
            "steps_s": steps - rollouts,
            **({"rollouts_s": rollouts} if rollouts else {}),
            "evaluation_s": evaluation,
            "checkpoints_s": checkpoints,
            "restarts_s": restarts,
            **({"trials_s": trials_s} if trials_s else {}),
        },
        "start_from": len(starts),
        "restarts": {
            "expected": failing.restarts(nodes=nodes, seconds=work),
            "failures": failing.failures,
            "node_hours": failing.node_s / 3600,
        },
    }


def without_restarts(whole: Mapping[str, Any]) -> dict[str, float]:
    """`{total_s, low_s, high_s}` of a result of `whole_run` without the expected restarts.

    Comparable with the measured total, which only runs of one attempt have. Empty for `{}`.
    """
    if not whole:
        return {}
    restarts = (whole.get("terms") or {}).get("restarts_s", 0.0)
    return {
        "total_s": whole["total_s"] - restarts,
        "low_s": whole["low_s"] - (1 - _START_ERROR) * restarts,
        "high_s": whole["high_s"] - (1 + _START_ERROR) * restarts,
    }


def learned_starts(*, pool: str, device: str) -> list[float]:
    """Seconds that recent ended runs of the pool took beyond steps, evaluation, checkpoints."""
    rows = (
        Run.objects.filter(pool_name=pool, kind="train", ended__isnull=False)
        .filter(prediction__measured__isnull=False, prediction__device=device)
        .order_by("-id")
        .values_list("prediction", flat=True)[:_RECENT]
    )
    starts = []
    for row in rows:
        document: dict[str, Any] = row or {}
        terms = (document.get("whole_run") or {}).get("terms") or {}
        beyond = document["measured"].get("beyond_steps_s")
        if beyond is not None and terms:
            own = beyond - sum(
                # a run with a total had one attempt, so no restart
                terms.get(name, 0.0)
                for name in ("evaluation_s", "checkpoints_s", "trials_s")
            )
            starts.append(max(_LEAST_START_S, own))
    return starts


def _usd(
    prediction: Mapping[str, Any], spec: RunSpec, *, steps_s: float, total_s: float
) -> float | None:
    price = prediction.get("usd_per_billion_tokens")
    assert spec.train is not None
    rate = prediction.get("tokens_per_s")
    if price is None or not rate:
        return None
    return float(price * rate * steps_s / 1e9 * total_s / steps_s)
