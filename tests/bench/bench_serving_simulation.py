"""The planner's simulation of a server against the server itself, at three rates; two cores.

`python -m tests.bench.bench_serving_simulation` serves SmolLM2-135M, sends it a first load, reads
the step costs that it has measured, and then sends three loads with the arrivals and lengths that
the simulation draws. `--rates 0.4,0.8,1.2` and `--requests 60` shape them. Records throughput and
percentiles of both, and the largest relative errors.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from orchestrator.planner import api
from orchestrator.planner.serving.simulation.load import Load, draw_requests
from tests.bench.record import record
from tests.bench.served import served
from workers.contracts.catalog.presets import preset
from workers.contracts.wire.serving_reports import ENGINE_SNAPSHOT, EngineSnapshot
from workers.models.weights.locations import models_home

FOLDER = "smollm2-135m-instruct"
RATES, REQUESTS = "0.4,0.8,1.2", 60
SPEC = {"max_seqs": 16, "max_batch_tokens": 512}
LENGTHS = {
    "prompt": {"mean": 120, "cv": 0.7, "min": 8, "max": 600},
    "output": {"mean": 48, "cv": 0.7, "min": 4, "max": 200},
}
GOALS = {"tokens_per_s": 0.10, "p50": 0.15, "p99": 0.30}


def main(arguments: list[str]) -> int:
    def option(name: str, default: str) -> str:
        return arguments[arguments.index(name) + 1] if name in arguments else default

    rates = [float(rate) for rate in option("--rates", RATES).split(",")]
    requests = int(option("--requests", str(REQUESTS)))
    folder = models_home() / FOLDER
    if not folder.exists():
        print(f"{folder} is missing; fetch it: python -m workers.models.fetch")
        return 2
    spec = {"kind": "serve", "model": {"path": str(folder)}, "serve": SPEC}
    with tempfile.TemporaryDirectory() as home, served(Path(home), spec) as (address, _):
        context = preset("smollm2-135m").max_seq_len
        for number, rate in enumerate((0.0, *rates)):
            load = Load.model_validate(
                {"rate": rate or 1.0, "requests": requests, "seed": number, **LENGTHS}
            )
            measured = asyncio.run(send_all(address, load, context))
            time.sleep(6)  # the server writes its snapshot every 5 s
            if not rate:
                state = EngineSnapshot.model_validate_json(
                    next(Path(home).rglob(ENGINE_SNAPSHOT)).read_text()
                ).state
                continue
            compare(load, rate, measured, state)
    return 0


def compare(load: Load, rate: float, measured: dict[str, Any], state: Any) -> None:
    """Simulate the load with the server's step costs, and record both."""
    simulated = api.simulate_serving(
        {
            "model": "smollm2-135m",
            "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 1},
            "quantize": "fp32",
            "kv_blocks": state.blocks,
            "block_size": state.block_size,
            "step_costs": state.step_costs.to_dict(),
            "load": load.to_dict(),
            **SPEC,
        }
    )
    errors = {"tokens_per_s": simulated["tokens_per_s"] / measured["tokens_per_s"] - 1}
    for name in ("ttft_s", "tpot_s"):
        for level in ("p50", "p99"):
            errors[f"{name}_{level}"] = simulated[name][level] / measured[name][level] - 1
    within = all(
        abs(error) <= GOALS[name if name in GOALS else name[-3:]] for name, error in errors.items()
    )
    record(
        "serving_simulation",
        what=f"error of simulated throughput, SmolLM2 on two cores, {rate} requests/s",
        value=abs(errors["tokens_per_s"]),
        unit="",
        figure="<= 0.1",
        goals=GOALS,
        errors={name: round(error, 3) for name, error in errors.items()},
        within_goals=within,
        measured=_rounded(measured),
        simulated=_rounded(simulated),
        step_costs=state.step_costs.to_dict(),
        load=load.to_dict(),
    )


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    names = ("tokens_per_s", "ttft_s", "tpot_s")
    return {
        name: round(numbers[name], 3)
        if isinstance(numbers[name], float)
        else {level: round(value, 4) for level, value in numbers[name].items()}
        for name in names
    }


async def send_all(address: str, load: Load, context: int) -> dict[str, Any]:
    """Send the requests at their arrivals; throughput and latencies as the client sees them."""
    arrivals, pairs = draw_requests(load, context)
    random = np.random.default_rng(load.seed)
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        models = (await client.get(f"{address}/v1/models")).json()
        name, began = models["data"][0]["id"], time.monotonic() + 0.5
        rows = await asyncio.gather(
            *(
                send(
                    client,
                    address,
                    name,
                    random.integers(1000, 40_000, prompt).tolist(),
                    output,
                    began + at,
                )
                for at, (prompt, output) in zip(arrivals, pairs, strict=True)
            )
        )
    first = np.array([row[1] - row[0] for row in rows])
    each = np.array(
        [
            (row[2] - row[1]) / (output - 1)
            for row, (_, output) in zip(rows, pairs, strict=True)
            if output > 1
        ]
    )
    seconds = max(row[2] for row in rows) - min(row[0] for row in rows)
    return {
        "tokens_per_s": float(sum(output for _, output in pairs) / seconds),
        "ttft_s": _spread(first),
        "tpot_s": _spread(each),
    }


def _spread(values: Any) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        **{f"p{level}": float(np.percentile(values, level)) for level in (50, 90, 99)},
    }


async def send(
    client: httpx.AsyncClient,
    address: str,
    model: str,
    prompt: list[int],
    output: int,
    at: float,
) -> tuple[float, float, float]:
    """Times of sending, of the first token and of the last one."""
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent, first, last = time.monotonic(), 0.0, 0.0
    async with client.stream("POST", f"{address}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                last = time.monotonic()
                first = first or last
    return sent, first, last


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
