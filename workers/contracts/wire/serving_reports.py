"""What an inference run tells of itself: where it serves, the state of its engine, what became of
each request.

Read by the control plane's proxy and pages. Knows neither the server nor who shows it.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field

from workers.contracts.base import Contract
from workers.contracts.specs.model import Count, Positive

SERVING = "serving"  # event: the server listens
DRAINING = "draining"  # event: it takes no new requests
SERVED = "served"  # event: the end of a serve run, with its Summary
GENERATED = "generated"  # event: the lines of a generate run are answered
EVALUATED = "evaluated"  # event: an evaluate run's results
QUANTIZED = "quantized"  # event: weights were made smaller, and by how much worse they are
STATE_PATH = "/internal/state"  # of the server: EngineState as JSON
# of the first of several replicas: the others' Tally as JSON, when they end
TALLY_PATH = "/internal/tally"
STOOD = "stood.json"  # of a serve run, beside requests.jsonl
KEY_HEADER = "x-orrery-key"  # carries `serve_key` between the control plane and a server
# beside it: who asked, each of whom gets an equal share of a queue
CLIENT_HEADER = "x-orrery-client"

Seconds = Annotated[float, Field(ge=0)]
FinishReason = Literal["stop", "length", "aborted", "error"]


def serve_key(fence: str) -> str:
    """Of the attempt with this fence: known to its server and the control plane alone."""
    return hashlib.sha256(f"serve {fence}".encode()).hexdigest()


class Serving(Contract):
    """The data of a `serving` event: requests with `serve_key(fence)` in KEY_HEADER go to
    `http://{host}:{port}`.
    """

    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    model: str
    context: Positive
    chat: bool = False
    block_size: Positive = 16
    blocks: Positive = 1
    backend: str = "orrery"


class RequestTold(Contract):
    """One answer on its way or ended.

    Times are seconds since the server's start; null where not come to yet.
    """

    id: str
    state: Literal["waiting", "prefill", "decode", "ended"]
    added_s: Seconds
    admitted_s: Seconds | None = None
    first_token_s: Seconds | None = None
    ended_s: Seconds | None = None
    prompt_tokens: Count
    shared_tokens: Count = 0
    new_tokens: Count = 0
    max_new_tokens: Positive
    blocks: Count = 0
    preemptions: Count = 0
    priority: int = 0
    accepted: Count = 0
    drafted: Count = 0
    finish: FinishReason | None = None


class EngineState(Contract):
    """`map` has a letter a block: `.` free, `k` free and kept by its hash, `1` held once, `s` held
    by several.
    """

    now_s: Seconds
    running: Count
    waiting: Count
    blocks: Count
    block_size: Positive
    used: Count
    map: str
    requests: list[RequestTold] = []
    ended: Count = 0
    draining: bool = False


class Stood(Contract):
    """How the engine stood at a time (Unix seconds): what a server wrote last into `STOOD`, in its
    rank's folder.
    """

    time: float
    state: EngineState


class FileTold(Contract):
    """A file that a run leaves behind; it becomes an artifact of the run."""

    name: str
    path: str
    bytes: Count = 0


class Tally(Contract):
    """What the replica that `rank` leads tells of its requests when it ends, `seconds` after it
    began: the newest
    latencies, and the last requests with times from its own start."""

    rank: Count
    seconds: Seconds = 0.0
    finishes: dict[str, Count] = {}
    prompt_tokens: Count = 0
    new_tokens: Count = 0
    shared_tokens: Count = 0
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    last: list[RequestTold] = []


class Summary(Contract):
    """Percentiles over all requests that ended, for the end of a run; null where there were none.

    Those of all replicas, but for as many as are `silent`: gone, and their folders on other nodes.
    `stood` is the
    engine's state when it was asked to end, without requests (`last` has them); left out where it
    is long.
    """

    requests: Count
    prompt_tokens: Count = 0
    new_tokens: Count = 0
    shared_tokens: Count = 0
    seconds: Seconds = 0.0
    ttft_s: dict[str, float] | None = None  # p50, p90, p99
    tpot_s: dict[str, float] | None = None
    finishes: dict[str, int] = {}
    last: list[RequestTold] = []
    silent: Count = 0
    stood: Stood | None = None
    files: list[FileTold] = []


class Evaluated(Contract):
    """The data of an `evaluated` event, and results.json. Losses are means over tokens, in nats;
    shares are 0 to 1.

    `lines` are documents, windows of a text, or questions, one a line of results.jsonl.
    """

    metrics: dict[str, float]
    lines: Count
    tokens: Count = 0
    seconds: Seconds = 0.0
    model: str
    quantize: str | None = None
    input: str | None = None
    window: Count = 0
    stride: Count = 0
    files: list[FileTold] = []


class Quantized(Contract):
    """The data of a `quantized` event, and the head of report.json.

    Perplexities are of the same held-out text.
    """

    method: str
    model: str
    path: str
    bits: Annotated[float, Field(gt=0)]
    group: Count = 0
    perplexity_before: Annotated[float, Field(gt=0)]
    perplexity_after: Annotated[float, Field(gt=0)]
    bytes_before: Positive
    bytes_after: Positive
    tokens: Count = 0
    calibration_tokens: Count = 0
    seconds: Seconds = 0.0
    files: list[FileTold] = []
