"""Goodput of a server under an open-loop load: answers per second that were in time; two cores.

`python -m tests.bench.bench_goodput` starts and loads Orrery's server with SmolLM2-135M;
`... NAME=URL=MODEL` loads another server with OpenAI's chat completions, started by hand with the
same weights; `--rates 0.5,1` and `--seconds 40` shape the load. Arrivals are Poisson and equal for
every server. Prompts are 10 to 300 tokens of the project's documents; answers have at most 8 to 160
tokens; decoding is greedy. An answer is in time if its first token comes within 2 s and the others
150 ms apart on average. The best rate counts; docs/benchmarks.md compares the servers.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.bench.record import ROOT, record
from tests.bench.served import served
from workers.models.weights.locations import models_home

FOLDER = "smollm2-135m-instruct"
TTFT_S, TPOT_S = 2.0, 0.150
RATES, SECONDS, PATIENCE_S = "0.5,1,1.5,2,3,4", 40.0, 30.0


@dataclass(frozen=True)
class Request:
    """One request of the load: when it is sent, its prompt and the maximum of new tokens."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Measured times of one answer, or why it failed."""

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")
    tokens: int = 0
    failed: str = ""

    @property
    def in_time(self) -> bool:
        """Whether it kept both time limits."""
        return not self.failed and self.ttft_s <= TTFT_S and self.tpot_s <= TPOT_S


def main(arguments: list[str]) -> int:
    def option(name: str, default: str) -> str:
        return arguments[arguments.index(name) + 1] if name in arguments else default

    rates, seconds = (
        [float(rate) for rate in option("--rates", RATES).split(",")],
        float(option("--seconds", str(SECONDS))),
    )
    folder = models_home() / FOLDER
    if not folder.exists():
        print(f"{folder} is missing; fetch it: python -m workers.models.fetch")
        return 2
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    servers = [item.split("=", 2) for item in arguments if item.count("=") == 2]
    for name, url, model in servers:
        measure(name, url, model, tokenizer, rates, seconds)
    if not servers:
        with tempfile.TemporaryDirectory() as home:
            measure_orrery(Path(home), folder, tokenizer, rates, seconds)
    return 0


def measure_orrery(
    home: Path, folder: Path, tokenizer: Tokenizer, rates: list[float], seconds: float
) -> None:
    with served(home, {"kind": "serve", "model": {"path": str(folder)}, "serve": {}}) as (
        address,
        _,
    ):
        base = f"{address}/v1"
        measure(
            "orrery",
            base,
            httpx.get(f"{base}/models").json()["data"][0]["id"],
            tokenizer,
            rates,
            seconds,
        )


def measure(
    name: str, base: str, model: str, tokenizer: Tokenizer, rates: list[float], seconds: float
) -> None:
    # warm up
    asyncio.run(
        load(
            base,
            model,
            tokenizer,
            [Request(0, item.prompt, 8) for item in draw_requests(tokenizer, 1, 3)],
        )
    )
    results: dict[str, dict[str, float]] = {}
    for rate in rates:
        answers = asyncio.run(load(base, model, tokenizer, draw_requests(tokenizer, rate, seconds)))
        good = sum(answer.in_time for answer in answers) / seconds
        ttft = sorted(answer.ttft_s for answer in answers)
        tpot = sorted(answer.tpot_s for answer in answers)
        results[str(rate)] = {
            "goodput": round(good, 3),
            "asked": len(answers),
            "failed": sum(bool(answer.failed) for answer in answers),
            "ttft_s_p50": round(ttft[len(ttft) // 2], 3),
            "tpot_s_p50": round(tpot[len(tpot) // 2], 4),
            "tokens": sum(answer.tokens for answer in answers),
        }
        print(
            name,
            rate,
            results[str(rate)],
            next((answer.failed for answer in answers if answer.failed), ""),
            flush=True,
        )
        if good < 0.5 * rate and good < 0.7 * max(row["goodput"] for row in results.values()):
            break  # above its capacity
    best = max(results.values(), key=lambda row: row["goodput"])
    record(
        "goodput",
        what=f"goodput of {name}: answers in time a second, open loop, SmolLM2",
        value=best["goodput"],
        unit="requests/s",
        ttft_s=TTFT_S,
        tpot_s=TPOT_S,
        seconds=seconds,
        rates=results,
    )


def draw_requests(tokenizer: Tokenizer, rate: float, seconds: float) -> list[Request]:
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))[:200_000]
    # different prompts per rate
    ids, chance = tokenizer.encode(text, add_special_tokens=False).ids, random.Random(rate)
    at, requests = 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        length, start = chance.randint(10, 300), chance.randrange(len(ids) - 300)
        requests.append(
            Request(at, tokenizer.decode(ids[start : start + length]), chance.randint(8, 160))
        )
    return requests


async def load(
    base: str, model: str, tokenizer: Tokenizer, requests: list[Request]
) -> list[Answer]:
    began = time.monotonic()
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(PATIENCE_S), limits=httpx.Limits(max_connections=None)
    ) as client:
        return await asyncio.gather(
            *(send(client, base, model, tokenizer, request, began) for request in requests)
        )


async def send(
    client: httpx.AsyncClient,
    base: str,
    model: str,
    tokenizer: Tokenizer,
    request: Request,
    began: float,
) -> Answer:
    await asyncio.sleep(max(0.0, began + request.at_s - time.monotonic()))
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
    }
    sent, first, last, text = time.monotonic(), 0.0, 0.0, ""
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            client.stream("POST", f"{base}/chat/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                return Answer(failed=f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line[6:]).get("choices") or [{}]
                if chunk := (choices[0].get("delta") or {}).get("content"):
                    last = time.monotonic()
                    first, text = first or last, text + chunk
    except (httpx.HTTPError, TimeoutError) as error:
        return Answer(failed=type(error).__name__)
    count = len(tokenizer.encode(text, add_special_tokens=False).ids)
    if not count:
        return Answer(failed="empty answer")
    return Answer(first - sent, (last - first) / max(1, count - 1), count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
