"""100 concurrent streams of equal requests on a CPU server: no errors, no leftovers, fair shares.

`python -m tests.bench.bench_streams [--seconds S]`, for a small random model and, if it was
fetched, SmolLM2-135M. Each stream is a client that sends its next request as soon as its answer has
ended; a stop ends the run.
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

from tests.bench.record import record
from tests.bench.served import served
from workers.models.weights.locations import models_home

STREAMS, NEW_TOKENS = 100, 32
SMALL = {
    "name": "small",
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "ffn": 384,
    "vocab": 4096,
    "max_seq_len": 512,
}
FOLDER = "smollm2-135m-instruct"


def main(arguments: list[str]) -> None:
    seconds = (
        float(arguments[arguments.index("--seconds") + 1]) if "--seconds" in arguments else 120.0
    )
    models: dict[str, Any] = {"small": SMALL}
    if (models_home() / FOLDER).exists():
        models["smollm2-135m"] = {"path": str(models_home() / FOLDER)}
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            measure(name, model, Path(folder), seconds)


def measure(name: str, model: Any, folder: Path, seconds: float) -> None:
    spec = {"kind": "serve", "model": model, "serve": {"max_seqs": STREAMS}}
    with served(folder, spec) as (address, server):
        url = httpx.URL(address)
        counts, errors, took_s = asyncio.run(_load(url.host, url.port or 0, seconds))
        state = httpx.get(f"{address}/internal/state").json()
    code = server.returncode
    finished = [
        json.loads(line) for line in (folder / "rank-0" / "requests.jsonl").read_text().splitlines()
    ]
    facts = {
        "model": name,
        "streams": STREAMS,
        "new_tokens": NEW_TOKENS,
        "seconds": round(took_s, 1),
        "exit": code,
        "tokens_per_s": round(sum(counts) / took_s, 1),
        "requests": len(finished),
        "least": min(counts),
        "most": max(counts),
        "preemptions": sum(row["preemptions"] for row in finished),
    }
    record(
        "streams",
        what=f"100 streams, {name}: errors",
        value=errors,
        unit="errors",
        figure="== 0",
        **facts,
    )
    left = state["used"] + state["running"] + state["waiting"]
    record(
        "streams",
        what=f"100 streams, {name}: blocks and requests left",
        value=left,
        unit="",
        figure="== 0",
        **facts,
    )
    fair = max(counts) / max(1, min(counts))
    record(
        "streams",
        what=f"100 streams, {name}: most by least tokens",
        value=fair,
        unit="",
        figure="<= 1.2",
        **facts,
    )


async def _load(host: str, port: int, seconds: float) -> tuple[list[int], int, float]:
    """Tokens of each stream, errors, and how long it took.

    Plain sockets: the load must cost less than the server.
    """
    counts, errors, started = [0] * STREAMS, 0, time.monotonic()

    async def client(index: int) -> None:
        nonlocal errors
        prompt = [1 + (index * 7 + position) % 4000 for position in range(24)]
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": NEW_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "seed": index,
                "return_token_ids": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        while time.monotonic() - started < seconds:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head.encode() + body)
            tokens, done = 0, False
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    tokens = line.partition(b'"token_ids":[')[2].partition(b"]")[0].count(b",") + 1
                    if time.monotonic() - started < seconds:
                        counts[index] += tokens
                    errors += b'"error"' in line
                done = done or line.startswith(b"data: [DONE]")
            errors += not done
            writer.close()

    await asyncio.gather(*(client(index) for index in range(STREAMS)))
    return counts, errors, min(seconds, time.monotonic() - started)


if __name__ == "__main__":
    main(sys.argv[1:])
