"""Reports of inference runs: the server's address, the engine's state, and finished requests.

The control plane's proxy and pages read them. Does not depend on the server.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count, Positive

SERVING = "serving"  # event: the server listens
DRAINING = "draining"  # event: it takes no new requests
SERVED = "served"  # event: the end of a serve run, with its Summary
GENERATED = "generated"  # event: a generate run has answered its lines
EVALUATED = "evaluated"  # event: an evaluate run's results
QUANTIZED = "quantized"  # event: weights were quantized, with the change in perplexity
# load and unload adapters, of the server and of the proxy, as in vLLM
LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
STATE_PATH = "/internal/state"  # of the server: EngineState as JSON
# of the first of several replicas: the others post their ReplicaStats when they end
REPLICA_STATS_PATH = "/internal/replica-stats"
ENGINE_SNAPSHOT = "engine_snapshot.json"  # of a serve run, next to requests.jsonl
OLD_ENGINE_SNAPSHOT = "stood.json"  # version 0.1 wrote this file name
KEY_HEADER = "x-orrery-key"  # carries `serve_key` between the control plane and a server
# identifies the client; each client gets an equal share of the queue
CLIENT_HEADER = "x-orrery-client"

Seconds = Annotated[float, Field(ge=0)]
FinishReason = Literal["stop", "length", "aborted", "error"]


def serve_key(fence: str) -> str:
    """The key of the attempt with this fence; only its server and the control plane have it."""
    return hashlib.sha256(f"serve {fence}".encode()).hexdigest()


class Serving(WireContract):
    """The data of a `serving` event.

    Requests with `serve_key(fence)` in KEY_HEADER go to `http://{host}:{port}`.
    """

    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    model: str
    context: Positive
    chat: bool = False
    pooling: bool = False  # a reward model: it scores texts and writes none
    block_size: Positive = 16
    blocks: Positive = 1
    backend: str = "orrery"


class RequestStats(WireContract):
    """One request, active or finished.

    Times are seconds since the server's start, null until they occur.
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
    max_new_tokens: Count
    blocks: Count = 0
    preemptions: Count = 0
    priority: int = 0
    accepted: Count = 0
    drafted: Count = 0
    adapter: str | None = None
    finish: FinishReason | None = None


class ServedAdapter(WireContract):
    """An adapter that a server has loaded.

    `slot` is its place in the model's memory, null while it is on disk or in host memory; `active`
    and `requests` count its unfinished requests and all of them. `quantized` is how its base was
    stored while it was trained, if in 4 bits.
    """

    name: str
    path: str
    rank: Positive
    slot: Count | None = None
    active: Count = 0
    requests: Count = 0
    quantized: str | None = None


class StepCosts(WireContract):
    """Seconds of one engine step, linear in its work, fitted to the `steps` newest steps.

    `step_s` per step, `prefill_token_s` per prompt token, `decode_s` per decoding sequence,
    `prefill_context_s` and `decode_context_s` per cached token that a query reads.
    """

    step_s: Seconds
    prefill_token_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    prefill_context_s: Seconds = 0.0
    decode_context_s: Seconds = 0.0
    steps: Count = 0


class EngineState(WireContract):
    """The engine's current state.

    `map` has one letter per block: `.` free, `k` free but cached by its hash, `1` used once, `s`
    shared.
    """

    now_s: Seconds
    running: Count
    waiting: Count
    blocks: Count
    block_size: Positive
    used: Count
    map: str
    requests: list[RequestStats] = []
    ended: Count = 0
    draining: bool = False
    adapters: list[ServedAdapter] = []
    adapter_slots: Count = 0
    step_costs: StepCosts | None = None


class EngineSnapshot(WireContract):
    """The engine's state at a time (Unix seconds), as a server last wrote it to ENGINE_SNAPSHOT."""

    time: float
    state: EngineState


class ArtifactRef(WireContract):
    """A file that a run produced; it becomes an artifact of the run."""

    name: str
    path: str
    bytes: Count = 0


class ReplicaStats(WireContract):
    """Requests of the replica that `rank` leads, sent when it ends, `seconds` after its start.

    The newest latencies, and the last requests with times since its own start.
    """

    rank: Count
    seconds: Seconds = 0.0
    finishes: dict[str, Count] = {}
    prompt_tokens: Count = 0
    new_tokens: Count = 0
    shared_tokens: Count = 0
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    last: list[RequestStats] = []


class Summary(WireContract):
    """Totals and percentiles of all finished requests at the end of a run; null without requests.

    They cover all replicas except the `silent` ones, which disconnected and whose folders are on
    other nodes. `snapshot` is the engine's state when it was asked to end, without requests (`last`
    has them); absent if it is long.
    """

    requests: Count
    prompt_tokens: Count = 0
    new_tokens: Count = 0
    shared_tokens: Count = 0
    seconds: Seconds = 0.0
    ttft_s: dict[str, float] | None = None  # p50, p90, p99
    tpot_s: dict[str, float] | None = None
    finishes: dict[str, int] = {}
    last: list[RequestStats] = []
    silent: Count = 0
    snapshot: EngineSnapshot | None = Field(
        default=None,
        validation_alias=AliasChoices("snapshot", "stood"),  # version 0.1 wrote `stood`
    )
    files: list[ArtifactRef] = []


class ComparedMetric(WireContract):
    """A metric of a model and of its baseline on the same items.

    `low` and `high` bound `after - before` with 95% confidence; null if the metric has no interval.
    `p` is the two-sided p-value that both are equal. `verdict` is same if that cannot be excluded
    at 5%.
    """

    name: str
    before: float
    after: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    verdict: Literal["better", "worse", "same"] = "same"


class Wins(WireContract):
    """Judgments of answers with and without training.

    `rate` is the share of wins, a tie counting half, with its 95% interval.
    """

    wins: Count = 0
    losses: Count = 0
    ties: Count = 0
    rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    high: Annotated[float, Field(ge=0, le=1)] = 1.0


class Evaluated(WireContract):
    """The data of an `evaluated` event, and results.json.

    Losses are means over tokens, in nats; shares are 0 to 1. `lines` are documents, windows of a
    text, or questions, one per line of results.jsonl. `intervals` are 95% confidence intervals by
    metric. With a `baseline`, `before` and `before_intervals` are its results on the same items.
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
    intervals: dict[str, tuple[float, float]] = {}
    baseline: str | None = None
    before: dict[str, float] = {}
    before_intervals: dict[str, tuple[float, float]] = {}
    compared: list[ComparedMetric] = []
    judged: Wins | None = None
    files: list[ArtifactRef] = []


class Quantized(WireContract):
    """The data of a `quantized` event, and the head of report.json.

    Both perplexities are of the same held-out text.
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
    files: list[ArtifactRef] = []
