"""Requests, output tokens, time and cost of a produce run before it starts.

A served model's own prediction gives the speed; other servers' speed is unknown and said to be.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.runs.models import Run
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.specs.finetuning.produce import ProduceBody

_BY_MODEL = ("judge", "reward")  # scores that are requests


@dataclass(frozen=True, slots=True)
class ProduceEstimate:
    """For `count` lines, if the filters reject none; tokens at most, if no answer ends early.

    `tokens_per_s`, `time_s` and `cost_usd` are None if unknown; `reason` then says why there is no
    time. `cost_usd` is of output tokens at the server's prices, or of a serve run's devices.
    """

    requests: int
    scoring_requests: int
    output_tokens: int
    tokens_per_s: float | None = None
    time_s: float | None = None
    cost_usd: float | None = None
    reason: str = ""


def estimate_produce(body: ProduceBody, server: Run | None) -> ProduceEstimate:
    """`server` is the serve run that the body names, or None."""
    candidates = body.samples if body.method == "best_of_n" else 1
    prompts = {"self_instruct": 1, "evol": body.rounds}.get(body.method, 0)
    requests = round(body.count * (prompts + candidates * _requests_per_answer(body)))
    scores = sum(each.kind in _BY_MODEL for each in body.filters)
    scores += body.method == "best_of_n" and body.score.kind in _BY_MODEL
    tokens = requests * body.max_new_tokens
    rate, reason = _rate(body, server)
    time_s = tokens / rate if rate else None
    cost = body.server.cost_usd(prompt_tokens=0, completion_tokens=tokens)
    if cost is None and server is not None and time_s is not None:
        cost = _device_cost(server, time_s)
    scoring = body.count * candidates * scores
    return ProduceEstimate(requests, scoring, tokens, rate, time_s, cost, reason)


def _requests_per_answer(body: ProduceBody) -> float:
    """1, and of the dialogues among the tasks one per answer and per follow-up question."""
    if body.method in ("answer", "best_of_n"):
        return 1.0
    total = sum(task.weight for task in body.tasks)
    dialogues = sum(task.weight for task in body.tasks if task.task_type == "dialogue")
    return 1.0 + dialogues / total * 2 * (body.turns - 1)


def _rate(body: ProduceBody, server: Run | None) -> tuple[float | None, str]:
    """Output tokens per second at the body's concurrency, or why they are unknown."""
    if body.server.run is None:
        return None, "no time is predicted: the speed of a server at a URL is unknown"
    prediction = server.prediction if server is not None else None
    if not prediction or prediction.get("kind") != "serving":
        reason = f"no time is predicted: run {body.server.run} has no prediction of its speed"
        return None, reason
    points = [
        prediction["full"],
        *(
            point
            for point in prediction.get("curve", ())
            if point["batch"] <= prediction["full"]["batch"]
        ),
    ]
    reached = [point for point in points if point["batch"] <= body.concurrency]
    if reached:
        return float(max(reached, key=lambda point: point["batch"])["tokens_per_s"]), ""
    return float(prediction["alone"]["tokens_per_s"]), ""


def _device_cost(server: Run, time_s: float) -> float | None:
    device = DEVICES.get(str((server.prediction or {}).get("device")))
    if device is None or not device.usd_per_hour:
        return None
    return time_s / 3600 * device.usd_per_hour * max(1, server.devices)
