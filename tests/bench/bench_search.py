"""A search over all axes: legal plans per second on one core, and the time of the full answer.

The models are GPT-3 175B on 512 devices and two others. The answer is that of the page and of REST:
search, ranked plans with every number, JSON text.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np

from tests.bench.record import record

ROUNDS = 30
GPT3: dict[str, Any] = {
    "model": "gpt3-175b",
    "cluster": {"device": "h100-80g", "nodes": 64, "devices_per_node": 8},
    "workload": {"seq_len": 2048, "global_batch_size": 1536, "tokens": 3e11},
}
MORE_REQUESTS = {
    "DeepSeek-V3 on 2048 devices": {
        "model": "deepseek-v3",
        "cluster": {"device": "h800-80g", "nodes": 256, "devices_per_node": 8},
        "workload": {"seq_len": 4096, "global_batch_size": 15360},
    },
    "Llama 3 70B on 512 devices": {
        "model": "llama3-70b",
        "cluster": {"device": "h100-80g", "nodes": 64, "devices_per_node": 8},
        "workload": {"seq_len": 8192, "global_batch_size": 1024},
    },
}


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    measure("GPT-3 175B on 512 devices", GPT3, figure=True)
    for label, request in MORE_REQUESTS.items():
        measure(label, request, figure=False)


def measure(label: str, request: dict[str, Any], *, figure: bool) -> None:
    from orchestrator.planner import api
    from orchestrator.planner.model.parameters import columns_for
    from orchestrator.planner.plan_request import ParseOptions
    from orchestrator.planner.request_parsing import parse_scenario
    from orchestrator.planner.search.rank_plans import rank_plans
    from workers.contracts.specs.plan import ParallelPlan

    scenario, problems = parse_scenario(request, ParseOptions())
    assert scenario is not None and not problems
    parameters = columns_for([scenario.request(ParallelPlan())])
    rates, answers, size = [], [], 0
    for _ in range(ROUNDS):
        ranking = rank_plans(scenario, parameters=parameters)
        rates.append(ranking.enumerated / ranking.seconds)
        started = time.perf_counter()
        text = json.dumps(api.search(request))
        answers.append(time.perf_counter() - started)
        size = len(text)
    record(
        "planner",
        what=f"search: {label}, all axes, plans/s on one core",
        value=float(np.median(rates)),
        unit="plans/s",
        figure=">= 1000000" if figure else "",
        legal=ranking.enumerated,
        fit=ranking.fit,
    )
    record(
        "planner",
        what=f"search: {label}, whole answer, p95",
        value=float(np.quantile(answers, 0.95)),
        unit="s",
        figure="<= 1" if figure else "",
        median=round(float(np.median(answers)), 4),
        bytes=size,
    )
    assert ranking.enumerated >= 10**6


if __name__ == "__main__":
    main()
